"""What the launcher's process runs: its own part of the package and nothing else of it, nor of what is installed."""

from __future__ import annotations

import os
import sys
import types

if __name__ == "__main__":
    # Named, and not imported: what the package has for everybody would take longer to load than all that is needed.
    package = types.ModuleType("skerry")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
    sys.modules["skerry"] = package
    from skerry.providers.local.launch.loop import main

    main(int(sys.argv[1]))
