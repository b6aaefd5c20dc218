"""Kernels compiled ahead of time: packs are built without a GPU, checked for drift, and used at load.

`recording.py` finds what a model launches, `build.py` compiles it, `pack.py` is the file, `source.py` hashes what a
kernel is made of, `load.py` and `launcher.py` put a pack in the place of Triton's compiler, `check.py` finds drift.
"""
