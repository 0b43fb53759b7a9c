"""The parts of ``benchmarks/gpu_session.py``."""
