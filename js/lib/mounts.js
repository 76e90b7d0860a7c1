// Buckets, mounted by the server: those of its configuration by name, and others with the address and keys that the program has.

export function checkedMount({ InvalidMountConfigError }, bucket, mountPath, options, env) {
  if (typeof mountPath !== "string" || !mountPath.startsWith("/"))
    throw new InvalidMountConfigError(`Mount path must be absolute (start with /): "${mountPath}"`);
  const { prefix = "/", readOnly = false, localBucket = false } = options;
  if (!prefix.startsWith("/")) throw new InvalidMountConfigError(`Prefix must start with '/': "${prefix}"`);
  const binding = options.endpoint === undefined ? env?.[bucket] : undefined;
  const name = typeof binding === "string" && binding ? binding : (binding?.bucket ?? bucket);
  return { bucket: name, mountPath, prefix: prefix.endsWith("/") ? prefix : `${prefix}/`, readOnly, localBucket };
}

/** What stands in for a Worker's R2 binding in `env`: a real one (of wrangler's or miniflare's), which the SDK copies by itself. */
export function isR2Bucket(binding) {
  return ["get", "put", "head", "delete", "list"].every((method) => typeof binding?.[method] === "function");
}

/** Where a bucket is that the server does not know by name, and its keys; undefined if the program does not say. */
export function ownBucket({ MissingCredentialsError }, bucket, options, env) {
  const { endpoint, credentials } = options.endpoint === undefined ? (env?.[bucket] ?? {}) : options;
  if (endpoint === undefined) return undefined;
  const keys = credentials ?? keysOf(env, "AWS") ?? keysOf(env, "R2");
  if (!keys)
    throw new MissingCredentialsError(
      `The server knows no bucket "${bucket}", and there are no credentials for it: pass them in options, or set R2_ACCESS_KEY_ID and R2_SECRET_ACCESS_KEY.`,
    );
  return { endpoint, credentials: { accessKeyId: keys.accessKeyId, secretAccessKey: keys.secretAccessKey } };
}

function keysOf(env, kind) {
  const [accessKeyId, secretAccessKey] = [env?.[`${kind}_ACCESS_KEY_ID`], env?.[`${kind}_SECRET_ACCESS_KEY`]];
  return accessKeyId && secretAccessKey ? { accessKeyId, secretAccessKey } : undefined;
}

export function mountFailure({ InvalidMountConfigError, S3FSMountError }, bucket, error) {
  if (error.code === "bucket_not_found" || error.code === "bucket_not_configured")
    return new InvalidMountConfigError(
      `${error.message} Name the bucket "${bucket}" in the server's buckets.toml, or pass its endpoint and credentials.`,
    );
  const refused = error.status >= 400 && error.status < 500;
  return refused ? new InvalidMountConfigError(error.message) : new S3FSMountError(`The bucket was not mounted: ${error.message}`);
}

export function unmountFailure({ InvalidMountConfigError, BucketUnmountError }, mountPath, error) {
  if (error.status === 404) return new InvalidMountConfigError(`No active mount found at path: ${mountPath}`);
  return new BucketUnmountError(error.message);
}
