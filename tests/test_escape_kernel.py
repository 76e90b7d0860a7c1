"""Code inside tries to get more from the kernel than it was given: powers, devices, descriptors, other namespaces."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from skerry.models import CreateSession, RunCode, StartProcess, WaitRequest
from skerry.providers.local.bubblewrap import CAPABILITIES
from skerry.runtime.runtime import Runtime
from tests.attempts import Sh, number, python

REFUSED = {"EPERM", "EACCES", "EROFS", "ENOENT", "ENOTDIR", "EINVAL", "ENODEV", "EIO"}


# -- powers ------------------------------------------------------------------------------------------------------------


async def test_a_setuid_program_gives_nobody_anything(sh: Sh) -> None:
    prepared = await sh(
        "cp /usr/bin/id /tmp/id && chown root:root /tmp/id && chmod 6755 /tmp/id && ls -l /tmp/id | cut -c4,7 && "
        "setpriv --reuid 65534 --regid 65534 --clear-groups /tmp/id -u"
    )
    assert prepared.stdout.split() == ["ss", "65534"], prepared.stderr
    su = await sh("setpriv --reuid 65534 --regid 65534 --clear-groups su -c id </dev/null")
    assert su.exit_code != 0


async def test_a_programs_own_capabilities_are_not_given_to_it(sh: Sh) -> None:
    got = await python(
        sh,
        """
        import shutil, struct, subprocess
        shutil.copy("/usr/bin/cat", "/tmp/cat")
        # Version 2, effective; all of the lower 32 permitted.
        given = attempt(lambda: os.setxattr("/tmp/cat", "security.capability",
            struct.pack("<IIIII", 0x02000001, 0xFFFFFFFF, 0, 0, 0)))
        command = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/tmp/cat", "/proc/self/status"]
        text = subprocess.run(command, capture_output=True, text=True).stdout
        print(json.dumps({"given": given, "has": [l.split()[1] for l in text.splitlines() if l.startswith("CapEff")]}))
        """,
    )
    assert got["has"] in (["0" * 16], [])  # none, or not even started


async def test_no_capability_can_be_taken_that_was_not_given(sh: Sh) -> None:
    got = await python(
        sh,
        f"""
        allowed = {sorted(CAPABILITIES.values())!r}
        out = {{}}
        for capability in range(41):
            if capability in allowed:
                continue
            low, high = (1 << capability) & 0xFFFFFFFF, (1 << capability) >> 32
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            data = (ctypes.c_uint32 * 6)(low, low, low, high, high, high)
            ctypes.set_errno(0)
            out[f"set {{capability}}"] = libc.capset(header, data)
            out[f"ambient {{capability}}"] = libc.prctl(47, 2, capability, 0, 0)
            out[f"bounding {{capability}}"] = -1 if libc.prctl(23, capability, 0, 0, 0) == 0 else 0
        print(json.dumps(out))
        """,
    )
    assert set(got.values()) == {-1}, got


async def test_the_maps_of_ids_are_written_once(sh: Sh) -> None:
    got = await python(
        sh,
        """
        print(json.dumps({
            name: attempt(lambda: written(f"/proc/self/{name}", "0 0 4294967295"))
            for name in ("uid_map", "gid_map")
        } | {"setgroups": attempt(lambda: written("/proc/self/setgroups", "deny"))}))
        """,
    )
    assert set(got.values()) <= REFUSED, got


async def test_ids_that_are_not_mapped_cannot_be_taken(sh: Sh) -> None:
    got = await python(
        sh,
        """
        out = {str(uid): attempt(lambda: os.setresuid(uid, uid, uid)) for uid in (65536, 1900000000, 4294967294)}
        open("/tmp/mine", "w").close()
        out["chown"] = attempt(lambda: os.chown("/tmp/mine", 70000, 70000))
        print(json.dumps(out))
        """,
    )
    assert set(got.values()) == {"EINVAL"}, got


async def test_the_clock_the_name_and_the_network_stay_as_they_are(sh: Sh) -> None:
    for command in (
        "date -s 2001-01-01", "hostname other", "ip link add d0 type dummy", "ip addr add 10.9.9.9/8 dev lo",
        "ip route add default dev lo", "ping -c1 -W1 127.0.0.1 -I raw", "renice -n -20 $$", "chrt -f 99 true",
    ):  # fmt: skip
        assert (await sh(command)).exit_code != 0, command


async def test_the_out_of_memory_killer_cannot_be_told_to_spare_one(sh: Sh) -> None:
    got = await python(sh, 'print(json.dumps(attempt(lambda: written("/proc/self/oom_score_adj", "-1000"))))')
    assert got in REFUSED


# -- /proc, /sys, /dev -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["default", "alone"])
async def test_files_of_the_kernel_are_neither_written_nor_told(runtime: Runtime, sh: Sh, session: str) -> None:
    if session == "alone":
        await runtime.sessions.create(CreateSession(id="alone"))
    for path in (
        "sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/kernel/hotplug", "sys/kernel/usermodehelper/bset",
        "sys/kernel/randomize_va_space", "sys/kernel/yama/ptrace_scope", "sys/kernel/unprivileged_bpf_disabled",
        "sys/vm/drop_caches", "sys/vm/overcommit_memory", "sys/fs/protected_symlinks", "sys/fs/suid_dumpable",
        "sys/fs/binfmt_misc/register", "sys/net/core/bpf_jit_enable", "sys/user/max_user_namespaces", "sysrq-trigger",
        "irq/0/smp_affinity", "acpi/wakeup", "scsi/scsi", "mtrr", "bus/pci/00/00.0",
    ):  # fmt: skip
        before = _content(Path("/proc", path))
        assert (await sh(f"echo '|/tmp/x' >/proc/{path}", session=session)).exit_code != 0, path
        assert (await sh(f"echo 1 >/proc/{path}", session=session)).exit_code != 0, path
        assert _content(Path("/proc", path)) == before, path
    for path in ("kcore", "kmsg", "kpagecount", "kpageflags", "slabinfo", "vmallocinfo", "timer_list", "sched_debug"):
        assert (await sh(f"head -c 16 /proc/{path}", session=session)).exit_code != 0, path
    assert (await sh("cat /proc/keys /proc/key-users", session=session)).stdout == ""
    told = await sh(
        "cut -d' ' -f1 /proc/kallsyms /proc/modules 2>/dev/null | grep -v '^0*$' | grep -c '^[0-9a-f]\\{16\\}$'"
    )
    assert told.stdout.strip() == "0"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_there_is_no_sysfs_and_no_cgroup_to_climb(sh: Sh) -> None:
    mounts = (await sh("cat /proc/self/mountinfo")).stdout
    kinds = {line.partition(" - ")[2].split()[0] for line in mounts.splitlines()}
    assert kinds <= {"overlay", "proc", "tmpfs", "devtmpfs", "devpts", "mqueue", "ext4", "xfs", "btrfs", "squashfs"}, (
        kinds
    )
    assert (await sh("ls -A /sys")).stdout == ""
    for kind in ("sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "proc", "overlay", "fuse"):
        assert (await sh(f"mkdir -p /tmp/m && mount -t {kind} none /tmp/m")).exit_code != 0, kind
    assert (await sh("cut -d: -f3 /proc/self/cgroup | sort -u")).stdout == "/\n"


async def test_no_device_can_be_made_or_opened(sh: Sh) -> None:
    got = await python(
        sh,
        """
        import stat
        out = {}
        devices = {"mem": (1, 1), "kmsg": (1, 11), "sda": (8, 0), "vda": (254, 0), "loop": (7, 0), "fuse": (10, 229),
                   "kvm": (10, 232), "tun": (10, 200), "console": (5, 1), "tty0": (4, 0), "loop-control": (10, 237)}
        for place in ("/tmp", "/dev", "/dev/shm", "/run", "/workspace"):
            for name, (major, minor) in devices.items():
                for kind in (stat.S_IFCHR, stat.S_IFBLK):
                    path = f"{place}/node-{name}-{kind}"
                    made = attempt(lambda: os.mknod(path, kind | 0o666, os.makedev(major, minor)))
                    out[path] = made if made != "ok" else attempt(lambda: os.close(os.open(path, os.O_RDONLY)))
        print(json.dumps(out))
        """,
    )
    assert set(got.values()) <= {"EPERM", "EACCES"}, got
    listed = await python(
        sh,
        """
        import stat
        kinds = {name: os.stat(f"/dev/{name}").st_mode for name in os.listdir("/dev") if name != "core"}
        print(json.dumps(sorted(n for n, mode in kinds.items() if stat.S_ISCHR(mode) or stat.S_ISBLK(mode))))
        """,
    )
    assert set(listed) - {"stdin", "stdout", "stderr", "ptmx"} == {"full", "null", "random", "tty", "urandom", "zero"}


# -- what leads outside ------------------------------------------------------------------------------------------------


async def test_no_link_of_any_process_inside_leads_out(runtime: Runtime, sh: Sh, home: Path) -> None:
    """Also not of those that came in from outside: an isolated session's, and the template of Python contexts."""
    marker = home / f"marker-{secrets.token_hex(8)}"
    marker.write_text("host")
    await runtime.sessions.create(CreateSession(id="alone"))
    await runtime.code.run(RunCode(code="1"))
    code = f"""
        out, seen = [], 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            places = [f"/proc/{{pid}}/root", f"/proc/{{pid}}/cwd", f"/proc/{{pid}}/exe"]
            for kind in ("fd", "map_files"):
                try:
                    places += [f"/proc/{{pid}}/{{kind}}/{{name}}" for name in os.listdir(f"/proc/{{pid}}/{{kind}}")]
                except OSError:
                    pass
            for place in places:
                seen += 1
                for above in ("", "/..", "/../../../../../../.."):
                    if os.path.exists(place + above + {str(marker)!r}):
                        out.append(place + above)
        print(json.dumps([out, seen]))
    """
    for session in ("default", "alone"):
        result = await sh("python3 - <<'E'\n" + _plain(code) + "\nE\n", session=session)
        assert result.exit_code == 0, result.stderr
        assert result.stdout.startswith("[[], "), result.stdout
    inside = await runtime.code.run(RunCode(code=_plain(code)))
    assert inside.stdout.startswith("[[], "), inside.error
    assert int(inside.stdout.split()[-1].rstrip("]")) > 50
    marker.unlink()


def _plain(code: str) -> str:
    import textwrap

    return "import json, os\n" + textwrap.dedent(code)


async def test_a_program_of_the_host_cannot_be_overwritten_through_a_process_that_runs_it(
    runtime: Runtime, sh: Sh
) -> None:
    await runtime.code.run(RunCode(code="1"))
    got = await python(
        sh,
        """
        out = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            target = attempt(lambda: os.readlink(f"/proc/{pid}/exe"))
            if target.startswith("/run/skerry") or "python" in target:
                out[pid] = attempt(lambda: os.close(os.open(f"/proc/{pid}/exe", os.O_WRONLY)))
        print(json.dumps(out))
        """,
    )
    assert got
    # On the host image the system's own Python is a copy in the sandbox's layer, busy while it runs.
    assert set(got.values()) <= {"EACCES", "EPERM", "EROFS", "ETXTBSY"}, got
    for path in ("/run/skerry/bin/python3", "/run/skerry/lib"):
        assert (await sh(f"touch {path} || chmod 777 {path} || rm -rf {path}")).exit_code != 0


async def test_processes_are_born_with_no_descriptor_but_their_own(runtime: Runtime, sh: Sh) -> None:
    listing = "ls -l /proc/self/fd | sed -n 's/.* -> //p'"
    seen = {
        "session": (await sh(listing)).stdout,
        "stateless": (await sh(listing, session=None)).stdout,
    }
    process = await runtime.processes.start(StartProcess(command=listing))
    await runtime.processes.wait(process.id, WaitRequest(timeout=30_000))
    seen["process"] = (await runtime.processes.logs(process.id)).stdout
    code = f"import subprocess; print(subprocess.run({listing!r}, shell=True, capture_output=True, text=True).stdout)"
    seen["code"] = (await runtime.code.run(RunCode(code=code))).stdout
    for kind, text in seen.items():
        assert text.strip(), kind
        for target in text.split():
            assert target.startswith(("pipe:", "/dev/null", "/run/skerry-scratch/", "/proc/")), (kind, target)


async def test_the_portals_own_socket_cannot_be_had(sh: Sh) -> None:
    got = await python(
        sh,
        f"""
        first = os.pidfd_open(1)
        out = {{f"getfd {{n}}": call({number("pidfd_getfd")}, first, n, 0) for n in range(8)}}
        out["read memory"] = call({number("process_vm_readv")}, 1, 0, 0, 0, 0, 0)
        buffer = ctypes.create_string_buffer(16)
        class Vector(ctypes.Structure):
            _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
        own, theirs = Vector(ctypes.addressof(buffer), 16), Vector(0x400000, 16)
        for name, number in (("read", {number("process_vm_readv")}), ("write", {number("process_vm_writev")})):
            out[name] = call(number, 1, ctypes.byref(own), 1, ctypes.byref(theirs), 1, 0)
        out.pop("read memory")
        print(json.dumps(out))
        """,
    )
    assert set(got.values()) == {"EPERM"}, got


async def test_processes_of_the_host_have_no_number_inside(sh: Sh) -> None:
    got = await python(
        sh,
        f"""
        import fcntl
        out = {{"pidfd": attempt(lambda: os.pidfd_open({os.getpid()})),
               "kill": attempt(lambda: os.kill({os.getpid()}, 0)),
               "group": attempt(lambda: os.killpg({os.getpgid(0)}, 0)),
               "priority": attempt(lambda: os.getpriority(os.PRIO_PROCESS, {os.getpid()}))}}
        reader, writer = os.pipe()
        out["signals"] = attempt(lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, {os.getpid()}))
        print(json.dumps(out))
        """,
    )
    assert set(got.values()) == {"ESRCH"}, got


async def test_two_roots_in_one_another_are_still_inside(sh: Sh, home: Path) -> None:
    marker = home / f"marker-{secrets.token_hex(8)}"
    marker.write_text("host")
    got = await python(
        sh,
        f"""
        os.makedirs("/tmp/jail/below", exist_ok=True)
        outside = os.open("/", os.O_RDONLY)
        os.chroot("/tmp/jail")
        os.chdir("/")
        os.chroot("below")
        for _ in range(64):
            os.chdir("..")
        os.chroot(".")
        first = os.path.exists({str(marker)!r})
        os.fchdir(outside)
        for _ in range(64):
            os.chdir("..")
        os.chroot(".")
        print(json.dumps([first, os.path.exists({str(marker)!r}), os.path.exists("/workspace")]))
        """,
    )
    assert got == [False, False, True]
    marker.unlink()


async def test_namespaces_cannot_be_entered_by_their_files(sh: Sh) -> None:
    for target in ("1", "$$"):
        for kind in ("-m", "-u", "-i", "-n", "-p", "-U", "-C"):
            assert (await sh(f"nsenter -t {target} {kind} true")).exit_code != 0, (target, kind)
