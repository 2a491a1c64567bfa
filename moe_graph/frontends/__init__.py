"""What must happen before dynamo: data-dependent expert loops, captured or lifted.

========================  ============================================================
``tracing``               for which backend dynamo traces, asked by model code
``capture``               data-dependent shapes in the graph, and a way back
``transformers_experts``  ``eager`` experts of transformers 5 in a traceable form
========================  ============================================================
"""
