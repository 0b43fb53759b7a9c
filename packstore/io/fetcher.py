"""Row groups that cannot be read: raised, asked for again, or left out."""

from __future__ import annotations

import logging
import threading

from packstore.config import ReadConfig
from packstore.config.storage import RetryConfig
from packstore.errors import IntegrityError, StorageError, told
from packstore.io.compact import CompactPacks
from packstore.io.crew import Job
from packstore.io.dataset import Dataset
from packstore.io.reader import Fetched
from packstore.io.retry import retrying

log = logging.getLogger("packstore")

_REFUSALS = 4
"""Attempts where an error seldom passes: rights and keys of a running training may be renewed."""


class GroupFetcher:
    """Reads row groups of a dataset as a :class:`ReadConfig` says; for use by many threads.

    Bytes that are not those that were written are fetched once more.

    Args:
        dataset: whose row groups.
        config: how often to ask, and what to do then.
        stopping: once set, nobody waits for an answer.
    """

    def __init__(self, dataset: Dataset, config: ReadConfig, stopping: threading.Event) -> None:
        self._dataset, self._config, self._stopping = dataset, config, stopping
        attempts = 1 if config.on_error == "raise" else config.attempts
        self._policy = RetryConfig(
            attempts=attempts, backoff=config.backoff, seconds=config.seconds
        )

    def fetch(self, group: int) -> Fetched:
        """The bytes of row group `group` of the dataset.

        Raises:
            StorageError: the store refuses; names the store, shard, row group and attempts.
            IntegrityError: the shard's footer is damaged.
        """
        return retrying(
            lambda: self._dataset.fetch(group),
            self._policy,
            self._policy.attempts or _REFUSALS,
            self._stopping.wait,
        )

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
            log.warning("left out: %s", told(error))
            return None

    def _decode(self, group: int, fetched: Job[Fetched] | None) -> CompactPacks:
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
