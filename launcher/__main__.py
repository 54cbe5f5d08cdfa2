"""`python -m syncvar_launcher` is `syncvar-launch`."""

from __future__ import annotations

import sys

from syncvar_launcher.run import main

sys.exit(main())
