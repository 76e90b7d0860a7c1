// A container engine for workerd (miniflare, `containerEngine.localDocker`) whose containers are sandboxes of Skerry: as much
// of Docker's API as workerd asks for, on a Unix socket. So a Worker with the SDK's Sandbox class runs as it is, without Docker.
//
// workerd starts two containers for each Durable Object: one of the Worker's image, and beside it a proxy of Cloudflare's
// through which it reaches ports of the first, by CONNECT. Here the first is a sandbox, and the proxy is this program.
import { createServer } from "node:http";
import { unlink } from "node:fs/promises";
import { Readable } from "node:stream";
import { pipeline } from "node:stream/promises";
import { Server } from "./server.js";

const INGRESS = "39001/tcp";
const CONTROL_PORT = 3000;
const BESIDE = "-proxy";
const ESTABLISHED = "HTTP/1.1 200 Connection established\r\n\r\n";
const RULES = "Sandboxes of Skerry reach the network by Skerry's rules: set them there (PUT /v1/sandboxes/{id}/egress), not in the Worker.";
const HOP = new Set(["connection", "keep-alive", "transfer-encoding", "content-length"]);

/** Serves until it is closed. Sandboxes whose containers were not removed then go to sleep when nobody uses them. */
export async function startEngine({ socketPath, url, apiKey = process.env.SKERRY_API_KEY }) {
  const engine = new Engine(new Server(url, apiKey));
  await engine.listen(socketPath);
  return engine;
}

class Engine {
  #server;
  #containers = new Map();
  #api = createServer((request, answer) => void this.#answer(request, answer));
  #sockets = new Set();
  /** Sandboxes that may be reached. */
  #running = new Set();
  /** What workerd said about a sandbox's way out, before there is one. */
  #wishes = new Map();

  constructor(server) {
    this.#server = server;
    this.#watch(this.#api);
  }

  async listen(socketPath) {
    await unlink(socketPath).catch(() => {});
    await listening(this.#api, socketPath);
  }

  async close() {
    const left = [...this.#running].map((id) => this.#server.call("PATCH", `/v1/sandboxes/${id}`, { keepAlive: false }));
    await Promise.allSettled(left);
    const ways = [...this.#containers.values()].flatMap(({ ingress }) => ingress ?? []);
    for (const socket of this.#sockets) socket.destroy();
    await Promise.all([this.#api, ...ways].map((one) => new Promise((resolve) => one.close(resolve))));
  }

  /** No time limits of Node's, and connections that end with the engine. */
  #watch(server) {
    server.requestTimeout = server.headersTimeout = 0;
    server.on("connection", (socket) => {
      this.#sockets.add(socket);
      socket.on("close", () => this.#sockets.delete(socket));
      socket.on("error", () => {});
    });
    return server;
  }

  // -- Docker's API -----------------------------------------------------------------------------------------------------

  async #answer(request, answer) {
    const say = (status, body) => {
      answer.writeHead(status, { "content-type": "application/json" });
      answer.end(body === undefined ? "" : JSON.stringify(body));
    };
    try {
      const url = new URL(request.url, "http://engine");
      const parts = url.pathname.replace(/^\/v[0-9.]+(?=\/)/, "").split("/").filter(Boolean);
      await this.#route(request, parts, url.searchParams, say);
    } catch (error) {
      say(500, { message: error.message });
    }
  }

  async #route(request, [noun, name, verb], query, say) {
    const { method } = request;
    if (noun === "_ping") return say(200);
    if (noun === "volumes") return say(200, { Volumes: [], Warnings: [] });
    if (noun === "networks") return say(200, { Name: name, IPAM: { Config: [{ Subnet: "127.0.0.0/8", Gateway: "127.0.0.1" }] } });
    if (noun === "images") return say(200, { Id: name, Config: { ExposedPorts: {} } });
    if (noun !== "containers") return say(404, { message: `Skerry's engine knows no ${noun}.` });
    if (name === "create") return this.#create(query.get("name"), JSON.parse(await text(request)), say);
    const container = this.#containers.get(name);
    if (verb === "wait" && !container) return say(200, { StatusCode: 0 });
    if (!container) return say(404, { message: `No such container: ${name}` });
    if (method === "DELETE") return this.#remove(container, say);
    switch (verb) {
      case "json":
        return say(200, this.#facts(container));
      case "start":
        return this.#start(container, say);
      case "kill":
      case "stop":
        await this.#stop(container, query.get("signal"));
        return say(204);
      case "wait":
        return container.running || query.get("condition") === "removed" ? container.waiting.push(say) : say(200, { StatusCode: container.exitCode });
      case "archive":
        // The certificate of a proxy that would read what a sandbox sends; nothing here reads it.
        request.resume();
        return say(200);
      default:
        return say(404, { message: `Skerry's engine does not know ${method} ${verb ?? ""} of a container.` });
    }
  }

  async #create(name, asked, say) {
    if (this.#containers.has(name)) return say(409, { message: `The container name "${name}" is already in use.` });
    const beside = name.endsWith(BESIDE);
    const id = `workerd-${name.replace(BESIDE, "").split("-").at(-1).slice(0, 32)}`;
    if (!beside) {
      const env = Object.fromEntries((asked.Env ?? []).map((line) => [line.split("=", 1)[0], line.slice(line.indexOf("=") + 1)]));
      try {
        await this.#make(id, env, asked.Labels ?? {});
      } catch (error) {
        // All that workerd passes on is that the container failed to start, and the SDK tries again for two minutes.
        console.warn(`The container ${name} was not made: ${error.message}`);
        return say(500, { message: error.message });
      }
    }
    this.#containers.set(name, { name, id, beside, running: false, ran: false, exitCode: 0, waiting: [] });
    say(201, { Id: name, Warnings: [] });
  }

  async #make(id, env, labels) {
    const wish = this.#wishes.get(id);
    if (wish?.answering) throw new Error(RULES);
    // When it sleeps is the Durable Object's to say, which stops it.
    const settings = { keepAlive: true, labels };
    await this.#server.call("POST", "/v1/sandboxes", { id, env, ...settings }).catch((error) => {
      if (error.code !== "sandbox_exists") throw error;
      return this.#server.call("PATCH", `/v1/sandboxes/${id}`, settings);
    });
    if (wish?.offline) await this.#server.call("PUT", `/v1/sandboxes/${id}/egress`, { mode: "none", allow: [] });
  }

  async #start(container, say) {
    if (container.beside) container.ingress = await this.#open(container.id);
    else {
      await this.#server.call("POST", `/v1/sandboxes/${container.id}/start`, {});
      this.#running.add(container.id);
    }
    container.running = container.ran = true;
    say(204);
  }

  async #stop(container, signal) {
    if (!container.running) return;
    if (!container.beside) {
      this.#running.delete(container.id);
      await this.#server.call("POST", `/v1/sandboxes/${container.id}/stop`);
    }
    this.#ended(container, signal === "9" || signal === "SIGKILL" ? 137 : 0);
  }

  async #remove(container, say) {
    container.ingress?.close();
    if (!container.beside) {
      this.#running.delete(container.id);
      // One that could not be started may have files of an earlier time.
      if (container.ran)
        await this.#server.call("DELETE", `/v1/sandboxes/${container.id}`).catch((error) => {
          if (error.status !== 404) throw error;
        });
    }
    this.#containers.delete(container.name);
    this.#ended(container, container.running ? 137 : container.exitCode);
    say(204);
  }

  #ended(container, exitCode) {
    container.running = false;
    container.exitCode = exitCode;
    for (const say of container.waiting.splice(0)) say(200, { StatusCode: exitCode });
  }

  #facts({ name, running, exitCode, ingress }) {
    const ports = ingress ? { [INGRESS]: [{ HostIp: "127.0.0.1", HostPort: String(ingress.address().port) }] } : {};
    return {
      Id: name,
      Name: `/${name}`,
      State: { Status: running ? "running" : "exited", Running: running, ExitCode: exitCode },
      Config: { Env: [], Labels: {} },
      NetworkSettings: { IPAddress: "127.0.0.1", Ports: ports, Networks: {} },
    };
  }

  // -- ports of sandboxes -----------------------------------------------------------------------------------------------

  /** The way to the ports of one sandbox: CONNECT for each connection, and a word about what it may reach. */
  async #open(id) {
    const control = this.#control(id);
    const ingress = this.#watch(createServer((request, answer) => void this.#tell(id, request, answer)));
    ingress.on("connect", (request, socket, head) => {
      const port = Number((request.headers["x-dst-addr"] ?? request.url).split(":").at(-1));
      // A request below a sandbox's address would start it, or make it anew.
      if (!this.#running.has(id)) return refuse(socket, "the container is not running");
      if (port !== CONTROL_PORT) return void this.#tunnel(id, port, socket, head);
      socket.write(ESTABLISHED);
      if (head.length) socket.unshift(head);
      control.emit("connection", socket);
    });
    await listening(ingress, { port: 0, host: "127.0.0.1" });
    return ingress;
  }

  /** What workerd says to its proxy: which names it wants to answer for itself, and whether the rest may be reached. */
  async #tell(id, request, answer) {
    let said;
    try {
      said = JSON.parse((await text(request)) || "{}");
    } catch {
      return void answer.writeHead(400).end();
    }
    if (request.url === "/egress") {
      const { dns, internet } = said;
      const wish = { answering: Boolean(dns?.allowHostnames?.length), offline: internet?.enabled === false };
      // A Worker that answers, allows or denies hosts has to know that nobody asks it.
      if (wish.answering && this.#running.has(id)) return void answer.writeHead(501).end(RULES);
      this.#wishes.set(id, wish);
    }
    answer.end();
  }

  /** The port of the container's own API. */
  #control(id) {
    const base = `/v1/sandboxes/${id}/container`;
    const control = createServer((request, answer) => void this.#pass(base, request, answer));
    control.requestTimeout = control.headersTimeout = 0;
    return control.on("upgrade", (request, socket, head) => this.#server.upgrade(base + request.url, request, socket, head));
  }

  async #pass(base, request, answer) {
    const left = new AbortController();
    answer.on("close", () => left.abort());
    const { method, headers } = request;
    const body = method === "GET" || method === "HEAD" ? undefined : Readable.toWeb(request);
    try {
      const said = await this.#server.send(base + request.url, { method, headers: flat(headers), body, signal: left.signal });
      answer.writeHead(said.status, [...said.headers].filter(([name]) => !HOP.has(name)).flat());
      if (said.body) await pipeline(Readable.fromWeb(said.body), answer);
      else answer.end();
    } catch (error) {
      if (answer.headersSent) return void answer.destroy();
      answer.writeHead(502).end(error.message);
    }
  }

  /** Bytes to and from any other port, in the frames of Skerry's own forwarding. */
  async #tunnel(id, port, socket, head) {
    let way;
    try {
      way = await this.#server.connect(`/v1/sandboxes/${id}/ports/${port}/tcp`);
    } catch (error) {
      return refuse(socket, error.message);
    }
    way.addEventListener("message", ({ data }) => {
      if (typeof data !== "string") return void socket.write(Buffer.from(data));
      const said = JSON.parse(data);
      if (said.type === "end") socket.end();
      if (said.type === "error") refuse(socket, said.message);
      if (said.type !== "ready") return;
      socket.write(ESTABLISHED);
      if (head.length) way.send(head);
      socket.on("data", (chunk) => way.send(chunk));
      socket.on("end", () => way.readyState === WebSocket.OPEN && way.send('{"type": "end"}'));
    });
    way.addEventListener("close", () => socket.end());
    socket.on("close", () => way.close());
    way.accept();
  }
}

function refuse(socket, message) {
  socket.end(`HTTP/1.1 502 Bad Gateway\r\ncontent-length: ${Buffer.byteLength(message)}\r\n\r\n${message}`);
}

function flat(headers) {
  return Object.entries(headers).map(([name, value]) => [name, String(value)]);
}

function listening(server, where) {
  return new Promise((resolve, reject) => {
    server.once("error", reject);
    server.listen(where, resolve);
  });
}

async function text(request) {
  let all = "";
  for await (const chunk of request) all += chunk;
  return all;
}
