// Cloudflare's Sandbox SDK 0.12.10 on machines of Skerry: the same names, and a URL in place of a binding.
import "./lib/platform.js";
import { sandboxId } from "./lib/objects.js";
import { Namespace, namespaceOf } from "./lib/namespace.js";

const cloudflare = await import("@cloudflare/sandbox");

export { SkerryError, UnsupportedInNodeError } from "./lib/errors.js";
export { Sandbox } from "./lib/sandbox.js";

export function getSandbox(where, id, options) {
  const name = options?.normalizeId ? id.toLowerCase() : id;
  return cloudflare.getSandbox(namespaceOf(where), sandboxId(name), options);
}

export function skerry(where, options = {}) {
  const at = typeof where === "string" || where instanceof URL ? { url: where } : where;
  return new Namespace({ ...at, ...options });
}

export function proxyToSandbox(request, env) {
  return cloudflare.proxyToSandbox(request, { ...env, Sandbox: namespaceOf(env) });
}

export const {
  BackupClient,
  BackupCreateError,
  BackupExpiredError,
  BackupNotFoundError,
  BackupRestoreError,
  BucketMountError,
  BucketUnmountError,
  CodeInterpreter,
  CommandClient,
  ContainerProxy,
  ContainerUnavailableError,
  FileClient,
  GitClient,
  InvalidBackupConfigError,
  InvalidMountConfigError,
  MissingCredentialsError,
  OperationInterruptedError,
  PortClient,
  ProcessClient,
  ProcessExitedBeforeReadyError,
  ProcessReadyTimeoutError,
  RPCTransportError,
  S3FSMountError,
  SandboxClient,
  SessionTerminatedError,
  UtilityClient,
  asyncIterableToSSEStream,
  collectFile,
  isDurableObjectCodeUpdateReset,
  isExecResult,
  isPlatformTransientError,
  isProcess,
  isProcessStatus,
  parseSSEStream,
  proxyTerminal,
  responseToAsyncIterable,
  streamFile,
} = cloudflare;
