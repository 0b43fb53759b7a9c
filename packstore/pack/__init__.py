"""Tokenizes records, packs them, and commits them as a dataset; also the package of the algorithms.

    packstore.pack(source, out, tokenizer=None, *, config=None, storage_options=None,
                   source_storage_options=None, progress=None, **settings) -> Dataset

    >>> import packstore
    >>> dataset = packstore.pack(
    ...     "prefs.jsonl", "prefs-8k", tokenizer="tokenizer.json", pack_size=8192
    ... )
    >>> dataset.manifest.fill_rate, dataset.manifest.records

Args of the call:
    source: path, glob, URL, folder, or a list of them (``.jsonl .json .parquet .arrow .csv``, also
        ``.gz`` and ``.zst``); an Arrow table, a Polars frame, an iterable of dicts; or a packstore
        dataset, which is packed again without tokenizing.
    out: folder or any fsspec URL that will hold the dataset.
    tokenizer: ``tokenizer.json``, a Hugging Face folder, a SentencePiece ``.model``, or a
        ``tokenizers.Tokenizer``. Not for a packstore dataset.
    config: all settings as one object, a :class:`packstore.PackConfig`.
    storage_options: passed to the fsspec filesystems of `out` and `source`.
    source_storage_options: passed to those of `source` instead, if it lies elsewhere.
    progress: called with stage, done, total and unit, often.
    settings: fields of :class:`packstore.PackConfig`; they override `config`.

The call is :func:`packstore.etl.pipeline.pack`, which says more. The modules of this package plan
packs from lengths and copy tokens into them; they use numpy and numba, and no files.
"""
