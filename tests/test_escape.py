"""Code inside tries to get out. Every test is an attempt that must fail, and leave the sandbox and host working."""

from __future__ import annotations

import secrets
import socket
import subprocess
from pathlib import Path

from skerry.providers.local import seccomp
from skerry.providers.local.provider import LocalProvider
from skerry.runtime.runtime import Runtime
from skerry.runtime.viewer import End, Screen
from tests.attempts import Sh, number, python
from tests.disks import opened
from tests.machines import descriptors


async def test_nothing_of_the_hosts_files_is_there(sh: Sh, tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    (tmp_path / "secret").write_text(secret)
    Path("/tmp/skerry-escape-secret").write_text(secret)
    try:
        result = await sh(
            f"cat /etc/shadow /etc/gshadow {tmp_path}/secret /tmp/skerry-escape-secret /proc/1/root{tmp_path}/secret "
            f"/../../..{tmp_path}/secret /oldroot{tmp_path}/secret; ls -A /root /home /var/lib /run /mnt /sys /boot; "
            f"grep -rs {secret[:16]}''{secret[16:]} /tmp /etc /run /var /root /home /workspace"
        )
    finally:
        Path("/tmp/skerry-escape-secret").unlink()
    assert secret not in result.stdout
    listed = set(result.stdout.split())
    assert not listed & {".ssh", ".bash_history", "docker.sock", "systemd", "dpkg", "secrets", ".aws"}


async def test_links_and_mounts_do_not_lead_out(runtime: Runtime, sh: Sh, home: Path) -> None:
    marker = home / "marker"
    marker.write_text("host")
    await sh(f"ln -s {marker} /workspace/link; mkdir -p {home}; echo inside >{marker}")
    assert (await runtime.files.read("/workspace/link")).content == "inside\n"
    assert marker.read_text() == "host"
    await runtime.files.write("/workspace/link", b"written")
    assert marker.read_text() == "host"


async def test_only_its_own_processes_are_visible_and_a_hosts_cannot_be_signalled(sh: Sh) -> None:
    victim = subprocess.Popen(["sleep", "600"])
    try:
        result = await sh(f"kill -9 {victim.pid}; kill -9 -1; true", session=None)
        assert result.exit_code in (0, 137)
        result = await sh("ls /proc | grep -c '^[0-9]'; ps -eo args")
        assert int(result.stdout.split()[0]) < 12
        assert "pytest" not in result.stdout
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


async def test_init_cannot_be_signalled_traced_or_read(sh: Sh) -> None:
    for name in ("KILL", "STOP", "TERM", "INT", "SEGV", "HUP", "CHLD", "USR1", "QUIT"):
        await sh(f"kill -{name} 1")
    assert (await sh("echo still here")).stdout == "still here\n"
    found = await python(
        sh,
        f"""
        ATTACH, SEIZE = 16, 0x4206
        out = {{"attach": call({number("ptrace")}, ATTACH, 1, 0, 0), "seize": call({number("ptrace")}, SEIZE, 1, 0, 0)}}
        for name in ("mem", "environ", "maps", "stack", "auxv", "syscall"):
            try:
                out[name] = open("/proc/1/" + name, "rb").read(10) and "ok"
            except OSError as error:
                out[name] = errno.errorcode[error.errno]
        import os
        try:
            out["fd"] = os.readlink("/proc/1/fd/3")
        except OSError as error:
            out["fd"] = errno.errorcode[error.errno]
        print(json.dumps(out))
        """,
    )
    assert isinstance(found, dict)
    assert set(found.values()) <= {"EPERM", "EACCES"}, found


async def test_no_namespace_of_any_kind_can_be_made(sh: Sh) -> None:
    flags = dict(seccomp.NAMESPACES)
    got = await python(
        sh,
        f"""
        flags = {flags!r}
        out = {{}}
        for name, flag in flags.items():
            out["unshare " + name] = call({number("unshare")}, flag)
            if name != "time":
                out["clone " + name] = call({number("clone")}, flag | 17, 0, 0, 0, 0)
        print(json.dumps(out))
        """,
    )
    assert isinstance(got, dict)
    assert set(got.values()) == {"EPERM"}, got
    assert (await sh("unshare -Ur true || bwrap --ro-bind / / true || mount -t tmpfs x /mnt")).exit_code != 0


async def test_raw_packet_and_hypervisor_sockets_do_not_exist(sh: Sh) -> None:
    got = await python(
        sh,
        """
        import socket
        out = {}
        for name, args in {
            "packet": (17, 3, 0), "vsock": (40, 1, 0), "alg": (38, 5, 0), "bluetooth": (31, 3, 1), "can": (29, 3, 1),
            "raw": (2, 3, 1), "key": (15, 3, 2), "xdp": (44, 3, 0),
        }.items():
            try:
                socket.socket(*args)
                out[name] = "ok"
            except OSError as error:
                out[name] = errno.errorcode[error.errno]
        print(json.dumps(out))
        """,
    )
    assert isinstance(got, dict)
    assert got.pop("raw") == "EPERM"
    assert set(got.values()) == {"EAFNOSUPPORT"}, got


async def test_the_upper_half_of_a_register_is_no_way_to_such_a_socket(sh: Sh) -> None:
    got = await python(
        sh,
        """
        import ctypes, platform
        libc = ctypes.CDLL(None, use_errno=True)
        number = {"x86_64": 41, "aarch64": 198}[platform.machine()]
        out = {}
        for family in (2, 17, 38, 40):
            found = libc.syscall(number, ctypes.c_ulong(1 << 32 | family), 1, 0)
            out[family] = "ok" if found >= 0 else errno.errorcode[ctypes.get_errno()]
        print(json.dumps(out))
        """,
    )
    assert got == {"2": "ok", "17": "EAFNOSUPPORT", "38": "EAFNOSUPPORT", "40": "EAFNOSUPPORT"}


async def test_sysctls_devices_and_kernel_files_are_out_of_reach(sh: Sh) -> None:
    for path in (
        "/proc/sys/kernel/hostname", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger",
        "/proc/sys/net/ipv4/ip_forward", "/proc/sys/fs/file-max", "/proc/sys/kernel/ns_last_pid",
    ):  # fmt: skip
        assert (await sh(f"echo 1 >{path}")).exit_code != 0, path
    for path in (
        "/dev/mem",
        "/dev/kmsg",
        "/proc/kcore",
        "/dev/sda",
        "/dev/vda",
        "/dev/kvm",
        "/dev/fuse",
        "/dev/net/tun",
    ):
        assert (await sh(f"head -c 1 {path}")).exit_code != 0, path
    assert (await sh("mknod /tmp/d b 8 0")).exit_code != 0
    assert (await sh("mknod /tmp/d c 1 1")).exit_code != 0
    assert (await sh("dmesg")).exit_code != 0


async def test_the_hosts_loopback_and_abstract_sockets_are_another_world(sh: Sh) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"skerry-{secrets.token_hex(6)}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        port = tcp.getsockname()[1]
        got = await python(
            sh,
            f"""
            import socket
            out = {{}}
            for key, family, address in (
                ("tcp", socket.AF_INET, ("127.0.0.1", {port})), ("any", socket.AF_INET, ("0.0.0.0", {port})),
                ("unix", socket.AF_UNIX, "\\0{name}"),
            ):
                with socket.socket(family) as s:
                    s.settimeout(5)
                    out[key] = errno.errorcode.get(s.connect_ex(address), "ok")
            out["interfaces"] = [name for _, name in socket.if_nameindex()]
            print(json.dumps(out))
            """,
        )
    assert isinstance(got, dict)
    interfaces = got.pop("interfaces")
    assert "lo" in interfaces
    assert not [name for name in interfaces if name.startswith(("eth", "en", "wl"))]
    assert set(got.values()) == {"ECONNREFUSED"}


async def test_root_inside_is_nobody_outside(sh: Sh, provider: LocalProvider, machine: object) -> None:
    await sh("touch /workspace/f; chmod 4755 /workspace/f")
    host_pid = int(subprocess.check_output(["pgrep", "-n", "-f", "init.pyc"]).split()[-1])
    status = Path(f"/proc/{host_pid}/status").read_text()
    uid = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:"))
    assert uid != 0
    with opened(provider.home) as disk:
        owners = {path.stat().st_uid for path in disk.glob("sandboxes/*/root/upper/workspace/f")}
    assert owners == {provider._idmap.runner_uid}
    assert provider.home.stat().st_mode & 0o077 == 0


async def test_capabilities_are_few_and_no_new_privileges_holds(runtime: Runtime, sh: Sh) -> None:
    from skerry.models import CreateSession
    from skerry.providers.local.bubblewrap import CAPABILITIES

    await runtime.sessions.create(CreateSession(id="iso"))
    allowed = sum(1 << bit for bit in CAPABILITIES.values())
    for session in ("default", "iso", None):
        result = await sh("cat /proc/self/status", session=session)
        fields = dict(line.split(":\t", 1) for line in result.stdout.splitlines() if ":\t" in line)
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"
        for name in ("CapBnd", "CapEff", "CapPrm"):
            assert int(fields[name], 16) & ~allowed == 0, (session, name, fields[name])


async def test_typing_into_ones_own_terminal_is_refused(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    code = "import fcntl,termios; fcntl.ioctl(0, termios.TIOCSTI, b'x')"
    await terminal.write(f'python3 -c "{code}"; exit\n'.encode())
    shown = b""
    while not isinstance(piece := await viewer.next(), End):
        shown += piece.data if isinstance(piece, Screen) else piece if isinstance(piece, bytes) else b""
    assert b"PermissionError" in shown


async def test_a_sandbox_full_of_processes_and_files_costs_the_server_no_descriptors(sh: Sh) -> None:
    await sh("true")
    before = await descriptors()
    await sh("for i in $(seq 200); do sleep 60 & done; exec 200<>/tmp/x; ulimit -n 4096 || true")
    await sh("python3 -c 'import socket,time; s=[socket.socket() for _ in range(900)]' || true")
    assert await descriptors(before + 4) <= before + 4  # two for a command whose children still run
