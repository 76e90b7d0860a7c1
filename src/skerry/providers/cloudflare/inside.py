"""What runs inside a sandbox of a bridge: small scripts for a POSIX shell, and for the bash that sessions are.

A bridge runs an argument vector and shows its output. It takes no input, tells no pid and sends no signal. So every
program is started by a script that says the pid, gives it what it is to read, and sees whether it is the same machine.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import skerry.portal

SCRIPTS = ("tools.py", "packing.py", "ignored.py", "unpacking.py", "swapping.py", "hashing.py", "squashing.py")

# Arguments: a mark, the file that says it is this machine, the directory, the text or (with a slash in front) the file
# for descriptor 3, the file or FIFO for stdin, what to do with it, how many variables; the variables; the program.
# The first line on stderr is the mark and what became of it: "P pid parent", "L" for a machine that is another one,
# "E errno cwd|exec" for what cannot be started.
LAUNCH = r"""
m=$1 f=$2 c=$3 t=$4 i=$5 k=$6 n=$7
shift 7
no() {
  case $t in /*) rm -f -- "$t" ;; esac
  [ "$k" != file ] || rm -f -- "$i"
  echo "$m $*" >&2
  exit 125
}
[ -e "$f" ] || no L
while [ "$n" -gt 0 ]; do export "$1"; shift; n=$((n - 1)); done
if ! cd -- "$c" 2>/dev/null; then
  if [ -d "$c" ]; then e=13; elif [ -e "$c" ]; then e=20; else e=2; fi
  no E "$e" cwd
fi
if ! command -v -- "$1" >/dev/null 2>&1; then
  case $1 in */*) [ -e "$1" ] && e=13 || e=2 ;; *) e=2 ;; esac
  no E "$e" exec
fi
case $t in
  '') ;;
  /*) exec 3<"$t"; rm -f -- "$t" ;;
  *) t=${t#=}
     exec 3<<EOT
$t
EOT
     ;;
esac
case $k in
  null) echo "$m P $$ $$" >&2; exec "$@" </dev/null ;;
  file) exec <"$i"; rm -f -- "$i"; echo "$m P $$ $$" >&2; exec "$@" ;;
esac
mkfifo -m 600 -- "$i" || exit 125
exec 5<>"$i"
trap 'exec 5>&-; u=1' USR1
d=
env --default-signal=INT,QUIT true 2>/dev/null && d='env --default-signal=INT,QUIT'
sh -c 'echo "$0 P $$ $PPID" >&2; exec "$@"' "$m" $d "$@" <"$i" 5>&- &
p=$!
exec 3<&-
while :; do
  u=
  wait "$p"
  r=$?
  [ -n "$u" ] && [ "$r" = 138 ] || break  # 138: it was the signal that ended the waiting, and not the program
done
rm -f -- "$i"
exit "$r"
"""

# For our own programs: the same question, whether it is this machine, which is then named by $0.
GUARD = r"""[ -e "$0" ] || exit 113; export LC_ALL=C; exec "$@" """
ANOTHER_MACHINE = 113

# Arguments: a FIFO, and base64 for it, or a file. Opened for both, so that no missing reader makes it wait.
FEED = r"""[ -p "$1" ] && printf %s "$2" | base64 -d 1<>"$1" """
FEED_FILE = r"""[ -p "$1" ] && cat -- "$2" 1<>"$1"; r=$?; rm -f -- "$2"; exit $r"""

# Arguments: the signal, what to signal ("tree", "below", "one"), the pid, pids to spare with all below them.
KILL = r"""
s=$1 w=$2 p=$3
shift 3
if [ "$w" != one ]; then
  p=$(grep -s '^PPid:' /proc/[0-9]*/status | awk -F '[/:\t ]+' -v r="$p" -v w="$w" -v spare=" $* " '
    { kids[$6] = kids[$6] " " $3 }
    function walk(p, a, n, i) {
      n = split(kids[p], a, " ")
      for (i = 1; i <= n; i++) if (!index(spare, " " a[i] " ")) { print a[i]; walk(a[i]) }
    }
    END { if (w == "tree") print r; walk(r) }')
fi
c=0
for x in $p; do kill "-$s" "$x" 2>/dev/null && c=$((c + 1)); done
echo "$c"
"""

CHILDREN = r"""grep -s '^PPid:' /proc/[0-9]*/status | awk -F '[/:\t ]+' -v r="$1" '$6 == r { print $3 }'"""

# Arguments: the directory of our own, what says that it is this machine, and base64 of our tools.
PREPARE = r"""mkdir -p -m 700 -- "$1" && printf %s "$2" >"$1/machine" && mkdir -p /workspace"""
UNPACK = r"""mkdir -p -- "$1" && printf %s "$2" | base64 -d | tar -xzf - -C "$1" """

# A file that was uploaded as parts takes its place. Arguments: how, its mode or "-", where to; the parts.
PLACE = r"""
k=$1 m=$2 t=$3
shift 3
export LC_ALL=C
mkdir -p -- "${t%/*}/" || exit 1
if [ "$k" = over ]; then
  cat -- "$@" >"$t" || exit 1
  [ "$m" = - ] || chmod "$m" -- "$t"
else
  n="${t%/*}/.skerry-$k-$$"
  cat -- "$@" >"$n" && { [ "$m" = - ] || chmod "$m" -- "$n"; } && mv -fT -- "$n" "$t" || { rm -f -- "$n"; exit 1; }
fi
"""

# One command of a session: a fresh bash that is made what the last one was, and keeps in a file what it has become.
# Arguments: the file, a mark, the directory to begin in, what to do ("text", "args", "state"), a directory for this
# command only, how many NAME VALUE pairs; those ("-" in front of the value unsets, "+" sets); an argument vector.
# A command that ends its shell ends the session: the mark is then the last thing on stderr.
SESSION = r"""
__skerry_file=$1 __skerry_mark=$2 __skerry_cwd=$3 __skerry_what=$4 __skerry_there=$5 __skerry_n=$6
shift 6
__skerry_with=("${@:1:2*__skerry_n}") __skerry_argv=("${@:2*__skerry_n+1}")
__skerry_text=
[[ $__skerry_what != text ]] || IFS= builtin read -r -d '' __skerry_text <&3
exec 3<&-
if [[ -f $__skerry_file ]]; then
  while IFS= builtin read -r __skerry_name; do builtin unset -v "$__skerry_name"; done < <(builtin compgen -e)
  builtin . "$__skerry_file" 2>/dev/null
else
  builtin cd -- "$__skerry_cwd" 2>/dev/null || builtin cd /
fi
if [[ $__skerry_what == state ]]; then
  builtin printf '%s\0' "$PWD"
  while IFS= builtin read -r __skerry_name; do
    builtin printf '%s=%s\0' "$__skerry_name" "${!__skerry_name}"
  done < <(builtin compgen -e)
  exit 0
fi
__skerry_pwd=
__skerry_back=()
if [[ -n $__skerry_there ]]; then
  __skerry_pwd=$PWD
  if ! builtin cd -- "$__skerry_there" 2>/dev/null; then
    builtin printf "Failed to change directory to '%s'\n" "$__skerry_there" >&2
    exit 1
  fi
fi
for ((__skerry_i = 0; __skerry_i < 2 * __skerry_n; __skerry_i += 2)); do
  __skerry_name=${__skerry_with[__skerry_i]}
  __skerry_had=$(builtin declare -p "$__skerry_name" 2>/dev/null) || __skerry_had="builtin unset -v $__skerry_name"
  __skerry_back+=("$__skerry_had")
  if [[ ${__skerry_with[__skerry_i + 1]} == -* ]]; then
    builtin unset -v "$__skerry_name"
  else
    builtin export "$__skerry_name=${__skerry_with[__skerry_i + 1]:1}"
  fi
done
builtin set --
builtin trap 'builtin command rm -f -- "$__skerry_file"; builtin printf %s "$__skerry_mark" >&2' EXIT
if [[ $__skerry_what == args ]]; then
  if builtin type -P -- "${__skerry_argv[0]}" >/dev/null; then
    (builtin trap - EXIT; builtin exec -- "${__skerry_argv[@]}")
  else
    builtin printf '%s: command not found\n' "${__skerry_argv[0]}" >&2
    (exit 127)
  fi
elif [[ $__skerry_what == words ]]; then
  builtin eval "${__skerry_options-}" 2>/dev/null
  if builtin type -- "${__skerry_argv[0]}" &>/dev/null; then
    "${__skerry_argv[@]}"
  else
    builtin printf '%s: command not found\n' "${__skerry_argv[0]}" >&2
    (exit 127)
  fi
else
  builtin eval "${__skerry_options-}" 2>/dev/null
  builtin eval "$__skerry_text"
fi
{
  __skerry_status=$?
  builtin trap - EXIT
  __skerry_options=$(builtin set +o; builtin shopt -p)
  builtin set +eux
} 2>/dev/null
{
  while IFS= builtin read -r __skerry_name; do
    case $__skerry_name in
      __skerry_* | BASH* | EPOCH* | SHELLOPTS | FUNCNAME | GROUPS | DIRSTACK | PIPESTATUS | _) ;;
      LINENO | RANDOM | SRANDOM | SECONDS | EUID | UID | PPID) ;;
      *) builtin declare -p "$__skerry_name" ;;
    esac
  done < <(builtin compgen -A variable)
  [[ ${#__skerry_back[@]} == 0 ]] || builtin printf '%s\n' "${__skerry_back[@]}"
  builtin declare -f
  builtin alias -p
  builtin printf 'builtin cd -- %q\n' "${__skerry_pwd:-$PWD}"
  builtin printf '__skerry_options=%q\n' "$__skerry_options"
} >"$__skerry_file.$$" 2>/dev/null &&
  builtin command mv -f -- "$__skerry_file.$$" "$__skerry_file"
exit "$__skerry_status"
"""


# Bridges pass output on as text, and what is none is lost on the way. What our tools say goes through this: base64 of
# each piece as it comes, a line each.
ENCODE = r"""
import base64, os, signal, sys
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.dup2(writer, 1)
    os.closerange(3, 64)
    os.execvp(sys.argv[1], sys.argv[1:])
os.close(writer)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while data := os.read(reader, 49152):
    line = memoryview(base64.b64encode(data) + b"\n")
    while line:
        line = line[os.write(1, line):]
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
os._exit(code if code >= 0 else 128 - code)
"""


def tools() -> bytes:
    """Our tools, as an archive that fits into an argument."""
    folder = Path(skerry.portal.__file__).parent
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in SCRIPTS:
            archive.add(folder / name, name)
    return buffer.getvalue()
