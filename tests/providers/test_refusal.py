"""A machine that cannot hold a sandbox gets no server: nothing ever runs unsandboxed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.providers.users import needs_root

_SERVE = """
import sys
from pathlib import Path
from skerry.errors import HostUnfitError
from skerry.server.serve import run
from skerry.settings import Settings
try:
    run(Settings(home=Path(sys.argv[1]), port=0), on_ready=lambda url: print("serving", url))
except HostUnfitError as error:
    print("refused:", error)
    sys.exit(3)
"""


@needs_root
def test_a_server_that_cannot_make_user_namespaces_does_not_start(tmp_path: Path) -> None:
    script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"'
    confined = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*confined, sys.executable, "-c", _SERVE, str(tmp_path / "home")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, "serving" in done.stdout) == (3, False), done.stderr
    assert "This machine cannot run sandboxes" in done.stdout
    assert "max_user_namespaces" in done.stdout
    assert list((tmp_path / "home" / "sandboxes").iterdir()) == []
