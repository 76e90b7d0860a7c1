import type { PtyOptions, Sandbox as CloudflareSandbox, SandboxClient, SandboxOptions, TunnelInfo, TunnelOptions } from "@cloudflare/sandbox";

// Everything that is the same: types, errors, clients, helpers. What is declared below takes the place of theirs.
export * from "@cloudflare/sandbox";

/** Methods whose code, options, results and errors are the SDK's own. */
type Methods = Pick<
  CloudflareSandbox,
  | "exec"
  | "execStream"
  | "startProcess"
  | "listProcesses"
  | "getProcess"
  | "killProcess"
  | "killAllProcesses"
  | "cleanupCompletedProcesses"
  | "getProcessLogs"
  | "streamProcessLogs"
  | "writeFile"
  | "readFile"
  | "readFileStream"
  | "mkdir"
  | "deleteFile"
  | "renameFile"
  | "moveFile"
  | "listFiles"
  | "exists"
  | "watch"
  | "checkChanges"
  | "gitCheckout"
  | "setEnvVars"
  | "createSession"
  | "getSession"
  | "deleteSession"
  | "createCodeContext"
  | "runCode"
  | "runCodeStream"
  | "listCodeContexts"
  | "deleteCodeContext"
  | "exposePort"
  | "unexposePort"
  | "getExposedPorts"
  | "isPortExposed"
  | "validatePortToken"
  | "mountBucket"
  | "unmountBucket"
  | "createBackup"
  | "restoreBackup"
  | "setSandboxName"
  | "configure"
  | "setSleepAfter"
  | "setKeepAlive"
  | "setContainerTimeouts"
  | "setTransport"
  | "setLabels"
  | "getContainerPlacementId"
  | "destroy"
>;

/** A WebSocket as a Worker gets one: it is silent until it is accepted. */
export interface AcceptableWebSocket extends WebSocket {
  accept(): void;
}

/** The answer to a request for a WebSocket: status 101, and the connection in `webSocket`. */
export interface UpgradeResponse extends Response {
  readonly status: 101;
  readonly webSocket: AcceptableWebSocket;
}

export interface ContainerState {
  status: "running" | "healthy" | "stopping" | "stopped" | "stopped_with_code";
  lastChange: number;
  exitCode?: number;
}

export interface WaitForPorts {
  ports?: number | number[];
  cancellationOptions?: { instanceGetTimeoutMS?: number; portReadyTimeoutMS?: number; waitInterval?: number; abort?: AbortSignal };
  startOptions?: object;
}

export interface Schedule<T = unknown> {
  taskId: string;
  callback: string;
  payload: T;
  type: "scheduled" | "delayed";
  time: number;
  delayInSeconds?: number;
}

export interface Tunnels {
  /** A preview URL for the port: the same one every time. */
  get(port: number, options?: TunnelOptions): Promise<TunnelInfo>;
  list(): Promise<TunnelInfo[]>;
  destroy(portOrInfo: number | TunnelInfo): Promise<void>;
}

export interface Sandbox extends Methods {
  /** Answers a request for a WebSocket (`Upgrade: websocket`) with a terminal of the default session. */
  terminal(request: Request, options?: PtyOptions): Promise<Response | UpgradeResponse>;
  /** Answers a request for a WebSocket with one to a server inside. */
  wsConnect(request: Request, port: number): Promise<Response | UpgradeResponse>;
  readonly tunnels: Tunnels;

  fetch(request: Request): Promise<Response>;
  containerFetch(request: Request, port?: number): Promise<Response>;
  containerFetch(url: string | URL, init?: RequestInit, port?: number): Promise<Response>;
  containerFetch(url: string | URL, port: number): Promise<Response>;

  start(): Promise<void>;
  startAndWaitForPorts(ports?: number | number[] | WaitForPorts, cancellation?: WaitForPorts["cancellationOptions"]): Promise<void>;
  stop(signal?: string | number): Promise<void>;
  waitForPort(options: { portToCheck: number; retries?: number; waitInterval?: number }): Promise<number>;
  getState(): Promise<ContainerState>;
  renewActivityTimeout(): void;

  /** Calls a method of the class later; lasts as long as this process. */
  schedule<T = unknown>(when: Date | number, callback: string, payload?: T): Promise<Schedule<T>>;
  listSchedules<T = unknown>(callback: string): Promise<Schedule<T>[]>;
  getSchedule<T = unknown>(taskId: string): Promise<Schedule<T> | undefined>;
  deleteSchedules(callback: string): void | Promise<void>;

  setAllowedHosts(hosts: string[]): Promise<void>;
  allowHost(hostname: string): Promise<void>;
  removeAllowedHost(hostname: string): Promise<void>;
  setDeniedHosts(hosts: string[]): Promise<void>;
  denyHost(hostname: string): Promise<void>;
  removeDeniedHost(hostname: string): Promise<void>;
  /** @throws UnsupportedInNodeError */
  setOutboundHandler(method: string, ...params: unknown[]): Promise<void>;
  /** @throws UnsupportedInNodeError */
  setOutboundByHost(hostname: string, method: string, ...params: unknown[]): Promise<void>;
  /** @throws UnsupportedInNodeError */
  setOutboundByHosts(handlers: Record<string, unknown>): Promise<void>;
  removeOutboundByHost(hostname: string): Promise<void>;
}

/** What a class of one's own may set and override. */
export interface SandboxObject extends Sandbox {
  defaultPort: number;
  requiredPorts?: number[];
  sleepAfter: string | number;
  envVars: Record<string, string>;
  labels?: Record<string, string>;
  enableInternet: boolean;
  allowedHosts?: string[];
  deniedHosts?: string[];
  client: SandboxClient;
  onStart(): void | Promise<void>;
  onStop(params?: { exitCode: number; reason: string }): void | Promise<void>;
  onError(error: unknown): unknown;
}

/** For `class MySandbox extends Sandbox`; give it to `skerry(url, { class: MySandbox })`. */
export declare const Sandbox: new (ctx: never, env: never) => SandboxObject;

export interface Address {
  url: string | URL;
  /** SKERRY_API_KEY of the environment unless given. */
  apiKey?: string;
  /** What a Worker would have as `env`: settings such as SANDBOX_TRANSPORT. The environment of the process unless given. */
  env?: object;
  class?: new (ctx: never, env: never) => SandboxObject;
}

/** The sandboxes of a server, in place of the binding of a Durable Object. */
export interface SandboxNamespace<T extends Sandbox = Sandbox> {
  idFromName(name: string): { readonly name: string; toString(): string };
  get(id: { readonly name: string }): T;
  getByName(name: string): T;
}

/** A URL; a URL and a key; an environment that has SKERRY_URL; a namespace; or an `env` whose `Sandbox` is one. */
export type Where =
  | string
  | URL
  | Address
  | SandboxNamespace
  | { Sandbox: SandboxNamespace }
  | { readonly [variable: string]: string | undefined };

/** The sandbox of that name. It is made when it is first used. */
export declare function getSandbox<T extends Sandbox>(where: SandboxNamespace<T>, id: string, options?: SandboxOptions): T;
export declare function getSandbox(where: Where, id: string, options?: SandboxOptions): Sandbox;

/** A namespace, for code that wants `env.Sandbox`. */
export declare function skerry<T extends Sandbox = Sandbox>(where: string | URL | Address, options?: Partial<Address>): SandboxNamespace<T>;

/** The answer of the server behind a preview address, if the request is for one; else null. */
export declare function proxyToSandbox(request: Request, env: Where): Promise<Response | null>;

/** What the server answered to a request of its own API that failed; or that no server answered. */
export declare class SkerryError extends Error {
  /** Of HTTP; 0 if no server answered. */
  readonly status: number;
  readonly code: string;
  readonly hint?: string;
  readonly details?: Record<string, unknown>;
}

/** A method that has its meaning only inside a Worker. */
export declare class UnsupportedInNodeError extends Error {
  readonly code: "UNSUPPORTED_IN_NODE";
  readonly method: string;
}
