"""What becomes of a row group that cannot be read: raised, asked for again, or left out."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time

from packstore.config import ReadConfig
from packstore.errors import IntegrityError, StorageError
from packstore.io.causes import is_passing
from packstore.io.compact import CompactPacks
from packstore.io.crew import Job
from packstore.io.dataset import Dataset
from packstore.io.reader import Fetched
from packstore.io.retry import asked_once

log = logging.getLogger("packstore")

_OF_OTHER_REFUSALS = 4
_LONGEST_WAIT = 20.0  # seconds between two attempts, about
_TOLD_AFTER = (4, 8)  # attempts: a short one is nobody's business, a training that stands still is
_FOR_GOOD = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_jitter = random.Random()  # times of waiting only; the global generator belongs to the training


class GroupFetcher:
    """Reads row groups of a dataset as a :class:`ReadConfig` says; for use by many threads.

    A store that cannot be reached, restarts or throttles is asked for `seconds`: a restart takes
    tens of them. Other refusals, which seldom pass, are asked about 4 times. Waits double, and
    differ from reader to reader by a random factor of 0.5 to 1.5. Bytes that are not those that
    were written are fetched once more. A file that is missing stays missing.

    Args:
        dataset: whose row groups.
        config: how often to ask, and what to do then.
        stopping: once set, nobody waits for an answer.
    """

    def __init__(self, dataset: Dataset, config: ReadConfig, stopping: threading.Event) -> None:
        self._dataset, self._config, self._stopping = dataset, config, stopping

    def fetch(self, group: int) -> Fetched:
        """The bytes of row group `group` of the dataset.

        Raises:
            StorageError: the store refuses; names the store, shard, row group and attempts.
            IntegrityError: the shard's footer is damaged.
        """
        end = time.monotonic() + self._config.seconds
        for attempt in itertools.count(1):
            try:
                with asked_once():
                    return self._dataset.fetch(group)
            except StorageError as error:
                if not self._pays_to_ask_again(error, attempt, end):
                    raise type(error)(f"{error} Tried {_times(attempt)}.") from error.__cause__
        raise AssertionError

    def read(self, group: int, fetched: Job[Fetched] | None = None) -> CompactPacks | None:
        """Row group `group` of the dataset; None if it is quarantined.

        Args:
            group: number in the dataset.
            fetched: its bytes, if another thread fetches them.

        Raises:
            StorageError: as :meth:`fetch`.
            IntegrityError: its bytes are not those that were written; likewise.
        """
        try:
            return self._decode(group, fetched)
        except (StorageError, IntegrityError) as error:
            if self._config.on_error != "quarantine":
                raise
            log.warning("left out: %s", error)
            return None

    def _decode(self, group: int, fetched: Job[Fetched] | None) -> CompactPacks:
        again = self._config.on_error != "raise" and self._config.attempts != 1
        try:
            data = self.fetch(group) if fetched is None else fetched.result()
            return self._dataset.decode(group, data)
        except IntegrityError as first:
            if not again:
                raise
            try:
                return self._dataset.decode(group, self.fetch(group))
            except IntegrityError as error:
                version = self._dataset.object_version(group)
                of = f" of {version}" if version else ""
                raise type(error)(f"{error} Fetched {_times(2)}{of}.") from first

    def _pays_to_ask_again(self, error: StorageError, attempt: int, end: float) -> bool:
        """Waits, if it does; `end` is when no attempt begins any more."""
        if self._config.on_error == "raise" or isinstance(error.__cause__, _FOR_GOOD):
            return False
        most = self._config.attempts
        if most is None and not is_passing(error):
            most = _OF_OTHER_REFUSALS
        wait = min(self._config.backoff * 2.0 ** min(attempt - 1, 64), _LONGEST_WAIT)
        wait *= _jitter.uniform(0.5, 1.5)
        if (most is not None and attempt >= most) or time.monotonic() + wait > end:
            return False
        if attempt in _TOLD_AFTER:
            log.warning("%s Asking again for up to %.0f s.", error, end - time.monotonic())
        return not self._stopping.wait(wait)


def _times(attempts: int) -> str:
    return "once" if attempts == 1 else f"{attempts} times"
