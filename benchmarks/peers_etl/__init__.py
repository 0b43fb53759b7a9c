"""Contenders of ``benchmarks/etl.py``: each turns the same JSON lines into packed,
stored ids.
"""
