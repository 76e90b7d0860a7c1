"""A bucket as a file system: Skerry's own server of the kernel's FUSE protocol."""
