// Buckets of the server's configuration, mounted by the server: their keys never enter a sandbox.

export function checkedMount({ InvalidMountConfigError }, bucket, mountPath, options) {
  if (typeof mountPath !== "string" || !mountPath.startsWith("/"))
    throw new InvalidMountConfigError(`Mount path must be absolute (start with /): "${mountPath}"`);
  const { prefix = "/", readOnly = false, localBucket = false } = options;
  if (!prefix.startsWith("/")) throw new InvalidMountConfigError(`Prefix must start with '/': "${prefix}"`);
  return { bucket, mountPath, prefix: prefix.endsWith("/") ? prefix : `${prefix}/`, readOnly, localBucket };
}

export function mountFailure({ InvalidMountConfigError, S3FSMountError }, bucket, error) {
  if (error.code === "bucket_not_found" || error.code === "bucket_not_configured")
    return new InvalidMountConfigError(
      `${error.message} Endpoint and keys of the bucket "${bucket}" belong into the server's buckets.toml; they are not sent from here.`,
    );
  const refused = error.status >= 400 && error.status < 500;
  return refused ? new InvalidMountConfigError(error.message) : new S3FSMountError(`The bucket was not mounted: ${error.message}`);
}

export function unmountFailure({ InvalidMountConfigError, BucketUnmountError }, mountPath, error) {
  if (error.status === 404) return new InvalidMountConfigError(`No active mount found at path: ${mountPath}`);
  return new BucketUnmountError(error.message);
}
