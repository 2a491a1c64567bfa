"""The GE engine: executes graph-engine graphs on host memory.

    ModelDef bytes --model.py--> Graph --plan.py--> Plan --executor.py--> numbers

`session.py` is the only door. `registry.py` holds one kernel per GE op type (`kernels/`), `ir.py`
the input, output and attribute names of the ops. The engine knows nothing about FX passes,
converters or backends: it executes GE graphs, whoever made them.
"""
