"""`python -m syncvar` is `syncvar`."""

from __future__ import annotations

import sys

from syncvar.cli.commands import main

sys.exit(main())
