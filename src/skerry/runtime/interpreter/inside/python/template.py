"""The template: a process with IPython imported and its shell built, of which every Python context is a fork.

Orders come one per packet on descriptor 3, a SOCK_SEQPACKET socket:

    {"fork": 1, "cwd": "/workspace", "env": {…}} + [stdout, stderr, requests, replies]  →  {"forked": 1, "pid": 12}
    {"preload": ["numpy", …]}                                                           →  {"preloaded": ["numpy"]}

With ``"apart": true`` a fork has none of what was preloaded. It says ``{"ready": pid, "version": …}`` first and
``{"exited": pid, "status": …}`` when a context has ended, and exits when the socket is closed.
"""

from __future__ import annotations

import gc
import os
import sys

gc.disable()  # what is imported stays: looking for garbage in it would only take time

here = os.path.dirname(os.path.abspath(__file__))

role = sys.argv[1:]
try:
    import skerry_nursery

    if role == ["seed"]:
        import skerry_seed
except ImportError as error:
    if not (error.name or "").startswith(("IPython", "traitlets")):
        raise
    sys.stderr.write(f"IPython is not installed for {sys.executable} ({error}).\n")
    sys.stderr.flush()
    os._exit(78)

# The code that runs later must neither see this directory nor be shadowed by it.
sys.path[:] = ["", *(entry for entry in sys.path if os.path.abspath(entry or ".") != here)]
sys.argv = [""]
if role == ["seed"]:
    skerry_seed.serve()
elif role == ["context"]:
    skerry_nursery.alone()
else:
    skerry_nursery.serve()
