"""Stands in for ``nospace_main.py`` on a kernel that lets nobody watch it."""

import json
import socket
import sys

socket.socket(fileno=int(sys.argv[1])).send(json.dumps({"i": 0, "unfit": "bpf: Operation not permitted"}).encode())
