// The SDK's own Sandbox class. Commands, processes, files, git, sessions, code, watching and terminals are its own code, over
// its own SandboxClient; what it would ask of Cloudflare's platform (starting and sleeping, preview addresses, buckets,
// backups, the way out) is asked of Skerry here.
import "./platform.js";
import { AsyncLocalStorage } from "node:async_hooks";
import { timingSafeEqual } from "node:crypto";
import { createBackup, restoreBackup } from "./backups.js";
import { SkerryError, UnsupportedInNodeError } from "./errors.js";
import { checkedMount, isR2Bucket, mountFailure, ownBucket, unmountFailure } from "./mounts.js";
import { Schedules } from "./schedules.js";
import { UpgradeResponse } from "./socket.js";
import { carryWishes, completed, wishing } from "./wishes.js";

const cloudflare = await import("@cloudflare/sandbox");
carryWishes(cloudflare);

const CONTROL_PORT = 3000;
/** One that is frozen goes on where it was, with the next request. */
const AWAKE = new Set(["active", "frozen"]);
const STOPPED = { exitCode: 0, reason: "exit" };
/** Set for what onStart() itself does: it must not wait for onStart(). */
const starting = new AsyncLocalStorage();
const aRuntime = { id: "skerry", owns: () => true, scope: (value) => value };

export class Sandbox extends cloudflare.Sandbox {
  #server;
  #awake = false;
  #start = null;
  #schedules = new Schedules(this);
  /** Ports that are exposed only for as long as a WebSocket to them is open. */
  #passages = new Map();

  /** Says which server; called once, by whoever made the object. */
  attach(server) {
    this.#server ??= server;
    // Skerry's addresses outlive sleep and restarts: there is no other runtime that they could belong to.
    this.currentRuntime = {
      get: async () => aRuntime,
      getStored: async () => aRuntime,
      getStatus: async () => ({ status: "active", runtime: aRuntime, containerStatus: "healthy" }),
      markStarted: async () => aRuntime,
      isActive: async () => true,
      assertActive: async () => {},
      clear: async () => {},
    };
  }

  get #id() {
    return this.ctx.id.toString();
  }

  #call(method, path, body) {
    return this.#server.call(method, `/v1/sandboxes/${this.#id}${path}`, body);
  }

  async ensureDefaultSession() {
    // Before it, not during it: onStart() may want the session that would wait for onStart().
    await this.#ready();
    return super.ensureDefaultSession();
  }

  // -- requests into the sandbox ----------------------------------------------------------------------------------------

  async containerFetch(asked, portOrInit, port) {
    const { url, request, to } = understood(asked, portOrInit, port, this.defaultPort);
    await this.#ready();
    const target = url.pathname + url.search;
    const headers = new Headers(request.headers);
    if (headers.get("upgrade")?.toLowerCase() === "websocket") return this.#connect(to, target, headers, request.signal);
    const base = to === CONTROL_PORT ? "/container" : `/ports/${to}/proxy`;
    const { method, body, signal } = completed(url.pathname, request);
    return this.#server.send(`/v1/sandboxes/${this.#id}${base}${target}`, { method, headers, body, signal });
  }

  async execWithSession(command, sessionId, options) {
    return wishing(options, () => super.execWithSession(command, sessionId, options));
  }

  async #connect(port, target, headers, signal) {
    headers.delete("origin"); // a page's, which has nothing to do with this hop
    try {
      if (port === CONTROL_PORT)
        return new UpgradeResponse(await this.#server.connect(`/v1/sandboxes/${this.#id}/container${target}`, headers, signal));
      const token = await this.#openPassage(port);
      try {
        const path = `/preview/${this.#id}/${port}${target}${target.includes("?") ? "&" : "?"}token=${token}`;
        const socket = await this.#server.connect(path, headers, signal);
        socket.addEventListener("close", () => void this.#closePassage(port), { once: true });
        return new UpgradeResponse(socket);
      } catch (error) {
        await this.#closePassage(port);
        throw error;
      }
    } catch (error) {
      if (signal?.aborted) throw error;
      return new Response(`The WebSocket could not be opened: ${error.message}`, { status: 502 });
    }
  }

  /** Only previews carry WebSockets: a port without one gets one that wants the API key too, until nobody needs it. */
  async #openPassage(port) {
    const exposed = (await this.#exposed()).find((one) => one.port === port);
    if (exposed && !this.#passages.has(port)) return exposed.token;
    this.#passages.set(port, (this.#passages.get(port) ?? 0) + 1);
    return (await this.#call("POST", "/ports", { port, private: this.#server.wantsKey })).token;
  }

  async #closePassage(port) {
    const open = (this.#passages.get(port) ?? 0) - 1;
    if (open > 0) return void this.#passages.set(port, open);
    if (this.#passages.delete(port)) await this.#unexpose(port).catch(() => {});
  }

  // -- waking and sleeping ----------------------------------------------------------------------------------------------

  async #ready() {
    if (this.#awake || starting.getStore() === this) return;
    this.#start ??= this.#wake().finally(() => (this.#start = null));
    await this.#start;
  }

  async #wake() {
    const info = await this.#info();
    if (!info) await this.#create();
    await this.#holdToRules();
    if (!info || !AWAKE.has(info.state)) {
      await this.#call("POST", "/start", {});
      await starting.run(this, () => this.onStart());
    }
    this.#awake = true;
  }

  async #create() {
    const settings = { sleepAfter: this.sleepAfter, keepAlive: this.keepAliveEnabled, labels: this.labels ?? {} };
    const env = Object.fromEntries(Object.entries(this.envVars).filter(([, value]) => typeof value === "string"));
    try {
      await this.#server.call("POST", "/v1/sandboxes", { id: this.#id, env, ...settings });
    } catch (error) {
      if (error.code !== "sandbox_exists") throw error;
      await this.#call("PATCH", "", settings);
    }
  }

  async #info() {
    try {
      return await this.#call("GET", "");
    } catch (error) {
      if (error.status === 404) return null;
      throw error;
    }
  }

  async #settle(settings) {
    try {
      await this.#call("PATCH", "", settings);
    } catch (error) {
      // One that is not there yet is made with them.
      if (error.status !== 404) throw error;
    }
  }

  async start() {
    this.#awake = false;
    await this.#ready();
  }

  async startAndWaitForPorts(ports, cancellation, options) {
    if (typeof ports === "object" && ports !== null && !Array.isArray(ports)) ({ ports, cancellationOptions: cancellation } = ports);
    await this.#ready();
    const timeout = cancellation?.portReadyTimeoutMS ?? this.containerTimeouts.portReadyTimeoutMS;
    for (const port of await this.getPortsToCheck(ports))
      if (port !== CONTROL_PORT) await this.#call("POST", `/ports/${port}/wait`, { mode: "tcp", timeout });
  }

  async waitForPort({ portToCheck, retries = 1, waitInterval = 300 }) {
    await this.startAndWaitForPorts(portToCheck, { portReadyTimeoutMS: retries * waitInterval });
    return retries;
  }

  async stop() {
    try {
      await this.#call("POST", "/stop");
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    await this.#stopped();
  }

  async destroy() {
    for (const name of this.#schedules.names()) this.#schedules.delete(name);
    await super.destroy();
    try {
      await this.#call("DELETE", "");
    } catch (error) {
      if (error.status !== 404) throw error;
    }
    await this.#stopped();
  }

  async #stopped() {
    this.#awake = false;
    this.#passages.clear();
    await this.onStop(STOPPED);
  }

  async getState() {
    const info = await this.#info();
    if (!info) return { status: "stopped", lastChange: Date.now() };
    const lastChange = Date.parse(info.lastActiveAt ?? info.startedAt ?? info.createdAt);
    return { status: AWAKE.has(info.state) ? "healthy" : "stopped", lastChange };
  }

  // The server counts idle time by what it sees itself.
  renewActivityTimeout() {}

  async scheduleNextAlarm() {}

  async setSleepAfter(sleepAfter) {
    await super.setSleepAfter(sleepAfter);
    await this.#settle({ sleepAfter });
  }

  async setKeepAlive(keepAlive) {
    await super.setKeepAlive(keepAlive);
    await this.#settle({ keepAlive });
  }

  async setLabels(labels) {
    const running = this.ctx.container.running;
    this.ctx.container.running = false; // theirs warns that labels wait for the next start; ours do not
    try {
      await super.setLabels(labels);
    } finally {
      this.ctx.container.running = running;
    }
    await this.#settle({ labels: { ...labels } });
  }

  // -- what is to be done later -----------------------------------------------------------------------------------------

  async schedule(when, callback, payload) {
    return this.#schedules.add(when, callback, payload);
  }

  async listSchedules(callback) {
    return this.#schedules.list(callback);
  }

  async getSchedule(id) {
    return this.#schedules.get(id);
  }

  deleteSchedules(callback) {
    this.#schedules.delete(callback);
  }

  // -- preview addresses ------------------------------------------------------------------------------------------------

  async #exposed() {
    try {
      return (await this.#call("GET", "/ports")).ports;
    } catch (error) {
      if (error.status === 404) return [];
      throw error;
    }
  }

  async #expose(port, { name, token, hostname } = {}) {
    const own = hostname && !local(hostname) ? { hostname } : {};
    const answer = await this.#call("POST", "/ports", { port, name, token, ...own });
    return { ...answer, url: answer.url ?? new URL(answer.pathUrl).href };
  }

  async #unexpose(port) {
    try {
      await this.#call("DELETE", `/ports/${port}`);
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }

  async exposePort(port, options) {
    // Theirs checks port, host name and token, and chooses a token; what it keeps is kept by the server.
    await super.exposePort(port, { ...options, hostname: local(options.hostname) ? "localhost" : options.hostname });
    const { token } = (await this.ctx.storage.get("portTokens"))[port];
    const { url } = await this.#expose(port, { ...options, token });
    this.#passages.delete(port);
    return { url, port, name: options.name };
  }

  async unexposePort(port) {
    await super.unexposePort(port);
    await this.#unexpose(port);
  }

  async #public() {
    return (await this.#exposed()).filter((one) => !this.#passages.has(one.port));
  }

  async getExposedPorts(hostname) {
    const exposed = await this.#public();
    const url = (one) => (local(hostname) ? (one.url ?? one.pathUrl) : this.constructPreviewUrl(one.port, this.#id, hostname, one.token));
    return exposed.map((one) => ({ url: url(one), port: one.port, status: "active" }));
  }

  constructPreviewUrl(port, name, hostname, token) {
    const kept = this.sandboxName;
    this.sandboxName = this.#id;
    try {
      return super.constructPreviewUrl(port, this.#id, hostname, token);
    } finally {
      this.sandboxName = kept;
    }
  }

  async isPortExposed(port) {
    return (await this.#public()).some((one) => one.port === port);
  }

  async readPortTokens() {
    return Object.fromEntries((await this.#exposed()).map(({ port, token, name }) => [port, { token, name: name ?? undefined }]));
  }

  previewTokensMatch(expected, actual) {
    const [one, other] = [expected, actual].map((text) => Buffer.from(text));
    return one.length === other.length && timingSafeEqual(one, other);
  }

  async validatePreviewURLForRuntime(port, token) {
    if (!(await this.validatePortToken(port, token))) return { status: "invalid" };
    const { status } = await this.getState();
    return status === "healthy" ? { status: "active", runtime: aRuntime } : { status: "stale", containerStatus: status };
  }

  async fetchPreviewIfRunning(request, port) {
    return this.containerFetch(request, port);
  }

  ensureTunnelsBuilt() {}

  get tunnels() {
    return {
      // One with a name has the same address every time.
      get: async (port, { name } = {}) => this.#tunnel(await this.#expose(port, { name, token: name?.replaceAll("-", "_") })),
      list: async () => (await this.#public()).map((one) => this.#tunnel({ ...one, url: one.url ?? one.pathUrl })),
      destroy: async (tunnel) => this.#unexpose(typeof tunnel === "number" ? tunnel : tunnel.port),
    };
  }

  #tunnel({ token, port, url, exposedAt, name }) {
    return { id: token, port, url, hostname: new URL(url).host, createdAt: exposedAt, ...(name ? { name } : {}) };
  }

  // -- buckets and backups ----------------------------------------------------------------------------------------------

  async mountBucketUnlocked(bucket, mountPath, options = {}) {
    if (isR2Bucket(this.env?.[bucket])) return super.mountBucketLocal(bucket, mountPath, options);
    const mount = checkedMount(cloudflare, bucket, mountPath, options, this.env);
    try {
      await this.#mount(mount, () => ownBucket(cloudflare, bucket, options, this.env));
    } catch (error) {
      throw error instanceof SkerryError ? mountFailure(cloudflare, bucket, error) : error;
    }
  }

  /** By name first: the keys of a bucket that the server knows are not sent. */
  async #mount(mount, own) {
    try {
      await this.#call("POST", "/mount", mount);
    } catch (error) {
      const elsewhere = error.code === "bucket_not_found" ? own() : undefined;
      if (!elsewhere) throw error;
      await this.#call("POST", "/mount", { ...mount, ...elsewhere });
    }
  }

  async unmountBucketUnlocked(mountPath) {
    if (this.activeMounts.has(mountPath)) return super.unmountBucketUnlocked(mountPath);
    try {
      await this.#call("POST", "/unmount", { mountPath });
    } catch (error) {
      throw unmountFailure(cloudflare, mountPath, error);
    }
  }

  async createBackup(options) {
    cloudflare.Sandbox.validateBackupDir(options.dir, "BackupOptions.dir");
    if (options.compression !== undefined) this.resolveBackupCompression(options.compression);
    const excludes = options.excludes;
    const request = Array.isArray(excludes) ? { ...options, excludes: this.normalizeBackupExcludes(excludes.map(String)) } : options;
    return this.enqueueBackupOp(() => createBackup(cloudflare, (body) => this.#call("POST", "/backup", body), request));
  }

  async restoreBackup(backup) {
    cloudflare.Sandbox.validateBackupDir(backup.dir, "backup.dir");
    return this.enqueueBackupOp(() => restoreBackup(cloudflare, (body) => this.#call("POST", "/restore", body), backup));
  }

  // -- the way out ------------------------------------------------------------------------------------------------------

  async #egress(policy) {
    try {
      return await this.#call(policy ? "PUT" : "GET", "/egress", policy);
    } catch (error) {
      // One that is not there yet gets its policy when it is made.
      if (error.code === "sandbox_not_found") return;
      if (error instanceof SkerryError && error.status === 404)
        throw new UnsupportedInNodeError("Deciding what a sandbox may reach", "this server has no such setting; a newer one has.");
      throw error;
    }
  }

  /** Before anything runs; where the rules of a class cannot be held to, nothing does. */
  async #holdToRules() {
    const { effectiveAllowedHosts: allow, effectiveDeniedHosts: deny } = this;
    const rules = allow ? { mode: "allowlist", allow } : this.enableInternet === false ? { mode: "none", allow: [] } : {};
    if (deny) rules.deny = deny;
    if (Object.keys(rules).length) await this.#egress(rules);
  }

  async setAllowedHosts(hosts) {
    this.allowedHostsOverride = [...hosts];
    await this.#holdToRules();
  }

  async allowHost(hostname) {
    await this.setAllowedHosts([...new Set([...(this.effectiveAllowedHosts ?? []), hostname])]);
  }

  async removeAllowedHost(hostname) {
    await this.setAllowedHosts((this.effectiveAllowedHosts ?? []).filter((one) => one !== hostname));
  }

  async setDeniedHosts(hosts) {
    this.deniedHostsOverride = [...hosts];
    await this.#holdToRules();
  }

  async denyHost(hostname) {
    await this.setDeniedHosts([...new Set([...(this.effectiveDeniedHosts ?? []), hostname])]);
  }

  async removeDeniedHost(hostname) {
    await this.setDeniedHosts((this.effectiveDeniedHosts ?? []).filter((one) => one !== hostname));
  }

  async setOutboundHandler() {
    throw new UnsupportedInNodeError("setOutboundHandler()", "requests of a sandbox are answered by Skerry's proxy, not by this program.");
  }

  async setOutboundByHost() {
    throw new UnsupportedInNodeError("setOutboundByHost()", "requests of a sandbox are answered by Skerry's proxy, not by this program.");
  }

  async setOutboundByHosts() {
    throw new UnsupportedInNodeError("setOutboundByHosts()", "requests of a sandbox are answered by Skerry's proxy, not by this program.");
  }

  async removeOutboundByHost() {}

  async applyOutboundInterception() {}
}

function local(hostname) {
  return /^(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\]|::1)(:\d+)?$/.test(hostname);
}

/** `containerFetch(request, port?)` or `containerFetch(url, init?, port?)`. */
function understood(asked, portOrInit, port, usual) {
  const given = typeof portOrInit === "number" ? portOrInit : port;
  const to = given ?? usual;
  if (asked instanceof Request) return { url: new URL(asked.url), request: asked, to };
  const init = typeof portOrInit === "object" && portOrInit !== null ? portOrInit : {};
  return { url: new URL(String(asked), "http://localhost"), request: init, to };
}
