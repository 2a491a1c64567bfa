"""What must happen before dynamo: data-dependent expert loops, served, captured or lifted.

The first three need nothing from the user; ``prepare`` is for loops that dynamo cannot trace.

========================  ============================================================
``tracing``               for which backend dynamo traces, asked by model code
``capture``               data-dependent shapes in the graph, and a way back
``breaks``                graph breaks in loops over experts, for the report
``transformers_experts``  ``eager`` experts of transformers 5 in a traceable form
``preparation``           ``prepare``: a model's modules with lifted loops
``loops``                 the loops of a function, written anew where that is right
``choices``               known before a loop: ids, masks, counts, experts with tokens
``experts``               what a loop runs over
``turn``                  a turn for an expert without tokens (rules: ``turn_*``)
``leftovers``             what is read after a loop, and what no one reads any more
``purity``                what a call does besides returning a value
``source``                the source of a method, and a function out of a changed tree
========================  ============================================================
"""
