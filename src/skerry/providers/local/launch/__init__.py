"""The launcher: the small process that starts sandboxes, so that the server does not have to fork.

It runs beside the server for as long as the server does (it ends when its socket closes, and every sandbox ends with
it, because bubblewrap was told to die with its parent). As root it first moves into a mount namespace of its own: the
mounts it needs exist nowhere else and vanish with it. One JSON message per packet, with descriptors beside it.

What is imported here is the standard library, and little of that: all of it is copied with each fork.
"""
