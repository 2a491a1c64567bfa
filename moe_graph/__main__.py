"""``python -m moe_graph``, see :mod:`moe_graph.cli`."""

import sys

from moe_graph.cli import main

sys.exit(main())
