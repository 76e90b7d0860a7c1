"""What people run in a machine of their own works behind the walls. No network: packages come from inside.

``docs/security.md`` lists what does not work. apt and dpkg are tried on an imported Debian, in test_imported.py.
"""

from __future__ import annotations

import io
import textwrap
import zipfile

import pytest

from skerry.runtime.runtime import Runtime
from tests.attempts import Sh

PROGRAM = """
#include <pthread.h>
#include <stdio.h>
static int deep(int n) { return n ? deep(n - 1) + 1 : *(volatile int *)0; }
static void *run(void *_) { puts("thread"); return 0; }
int main(int count, char **words) {
    pthread_t thread;
    pthread_create(&thread, 0, run, 0);
    pthread_join(thread, 0);
    puts("main");
    return count > 1 ? deep(3) : 0;
}
"""


def wheel() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny.py", "def main():\n    print('tiny')\n")
        facts = "tiny-1.0.dist-info"
        archive.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{facts}/entry_points.txt", "[console_scripts]\ntiny = tiny:main\n")
        archive.writestr(f"{facts}/RECORD", "")
    return file.getvalue()


async def does(sh: Sh, command: str) -> str:
    result = await sh(textwrap.dedent(command), timeout=100_000)
    assert result.exit_code == 0, result.stdout + result.stderr
    return result.stdout


async def test_pip_installs_from_an_index(runtime: Runtime, sh: Sh) -> None:
    await runtime.files.mkdir("/srv/simple/tiny", recursive=True)
    await runtime.files.write("/srv/simple/tiny/tiny-1.0-py3-none-any.whl", wheel())
    await does(
        sh, "python3 -m http.server -d /srv 8000 >/dev/null 2>&1 & until echo >/dev/tcp/127.0.0.1/8000; do :; done"
    )
    index = "--index-url http://127.0.0.1:8000/simple --no-cache-dir --disable-pip-version-check"
    await does(sh, f"/run/skerry/bin/pip install -q --target /tmp/here {index} tiny")
    assert await does(sh, "PYTHONPATH=/tmp/here python3 -c 'import tiny; tiny.main()'") == "tiny\n"


async def test_npm_packs_and_installs_and_node_runs_threads(sh: Sh) -> None:
    await does(
        sh,
        """
        mkdir -p /tmp/tiny /tmp/app && cd /tmp/tiny
        echo '{"name": "tiny", "version": "1.0.0", "bin": {"tiny": "run.js"}}' >package.json
        printf '#!/usr/bin/env node\\nconsole.log("tiny")\\n' >run.js
        npm pack --silent && cd /tmp/app && npm init -y >/dev/null
        npm install --offline --no-audit --no-fund ../tiny/tiny-1.0.0.tgz
        """,
    )
    assert await does(sh, "cd /tmp/app && npx tiny") == "tiny\n"
    code = "new (require('worker_threads').Worker)('console.log(6 * 7)', {eval: true})"
    assert await does(sh, f'node -e "{code}"') == "42\n"


async def test_git_keeps_clones_and_serves_repositories(sh: Sh) -> None:
    told = await does(
        sh,
        """
        export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@example.com GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@example.com
        git init -q /tmp/one && cd /tmp/one && echo text >file && git add . && git commit -qm first && git gc -q
        git daemon --base-path=/tmp --export-all --reuseaddr --detach
        until git clone -q git://127.0.0.1/one /tmp/two 2>/dev/null; do sleep 0.1; done
        git -C /tmp/two log --format=%s
        """,
    )
    assert told == "first\n"


async def test_gcc_builds_and_gdb_and_strace_look_at_ones_own_children(sh: Sh) -> None:
    await sh("cat >/tmp/a.c", stdin=PROGRAM, session=None)
    assert await does(sh, "cd /tmp && gcc -g -pthread a.c -o a && ./a") == "thread\nmain\n"
    seen = await does(
        sh, "cd /tmp && gdb -q -batch -ex 'break deep' -ex run -ex 'print n' -ex c -ex c -ex bt --args ./a x 2>&1"
    )
    assert "$1 = 3" in seen
    assert "in main" in seen
    seen = await does(
        sh, "cd /tmp && strace -f -o trace ./a && grep -c 'write(1' trace && grep -o 'clone3.*ENOSYS' trace | wc -l"
    )
    assert int(seen.split()[-2]) >= 1
    attached = """
        sleep 100 & strace -p $! -o /tmp/t & until grep -q '' /tmp/t; do sleep 0.05; kill -CONT %1; done
        kill %1; wait; cat /tmp/t
    """
    assert "SIGTERM" in (await sh(attached)).stdout


async def test_chromium_shows_a_page_if_told_to_do_without_a_sandbox_of_its_own(sh: Sh) -> None:
    page = "<p id=x></p><script>x.textContent = 6 * 7 + location.protocol</script>"
    await sh("cat >/tmp/page.html; mkdir -p /etc/chromium.d; touch /etc/chromium.d/none", stdin=page, session=None)
    chromium = "chromium --headless --disable-gpu --dump-dom file:///tmp/page.html"
    shown = await sh(f"{chromium} --no-sandbox", timeout=100_000)
    assert "42file:" in shown.stdout, shown.stderr
    # Its own is made of user namespaces, which there are none of inside.
    alone = await sh(f"useradd -m somebody && su somebody -c '{chromium}'", timeout=100_000)
    assert alone.exit_code != 0
    assert "42file:" not in alone.stdout


@pytest.mark.parametrize(
    "command", ["perf stat true", "unshare -r true", "bwrap --ro-bind / / true", "keyctl show", "dmesg"]
)
async def test_what_the_documentation_says_does_not_work_does_not(sh: Sh, command: str) -> None:
    assert (await sh(command)).exit_code != 0
