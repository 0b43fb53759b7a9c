"""Reads row groups with retries, and raises or quarantines those that cannot be read."""

from __future__ import annotations

import logging
import threading

from packstore.config import ReadConfig, RetryConfig
from packstore.errors import IntegrityError, StorageError, told
from packstore.format.arrays import Packs
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.reader import Fetched
from packstore.io.dataset.thread_pool import Job
from packstore.io.store.retry import retrying

log = logging.getLogger("packstore")

_REFUSALS = 4
"""Attempts at errors that rarely pass: keys of a running training may be renewed meanwhile."""


class GroupFetcher:
    """Reads row groups of a dataset by the rules of a :class:`ReadConfig`. Thread-safe.

    If a checksum does not match, the bytes are fetched once more.

    Args:
        dataset: contains the row groups.
        config: the number of retries, and what to do after the last.
        stopping: once set, waits and retries end.
    """

    def __init__(self, dataset: Dataset, config: ReadConfig, stopping: threading.Event) -> None:
        self._dataset, self._config, self._stopping = dataset, config, stopping
        attempts = 1 if config.on_error == "raise" else config.attempts
        self._policy = RetryConfig(
            attempts=attempts, backoff=config.backoff, seconds=config.seconds
        )

    def fetch(self, group: int) -> Fetched:
        """Returns the bytes of row group `group` of the dataset.

        Raises:
            StorageError: the store refuses; the text names store, shard, row group and attempts.
            IntegrityError: the shard's footer is damaged.
        """
        return retrying(
            lambda: self._dataset.fetch(group),
            self._policy,
            self._policy.attempts or _REFUSALS,
            self._stopping.wait,
        )

    def read(self, group: int, fetched: Job[Fetched] | None = None) -> Packs | None:
        """Returns row group `group` of the dataset; None if it is quarantined.

        Args:
            group: number in the dataset.
            fetched: job of another thread that fetches its bytes, if there is one.

        Raises:
            StorageError: like :meth:`fetch`.
            IntegrityError: a checksum does not match; text like :meth:`fetch`.
        """
        try:
            return self._decode(group, fetched)
        except (StorageError, IntegrityError) as error:
            if self._config.on_error != "quarantine":
                raise
            log.warning("left out: %s", told(error))
            return None

    def _decode(self, group: int, fetched: Job[Fetched] | None) -> Packs:
        try:
            data = self.fetch(group) if fetched is None else fetched.result()
            return self._dataset.decode(group, data)
        except IntegrityError:
            if self._policy.attempts == 1:
                raise
        try:
            return self._dataset.decode(group, self.fetch(group))
        except IntegrityError as error:
            version = self._dataset.object_version(group)
            error.add_note(f"Fetched 2 times{f' of {version}' if version else ''}.")
            raise
