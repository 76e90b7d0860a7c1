// A Worker with the SDK's own Sandbox class, unchanged. Each check runs inside workerd, on a sandbox that is asked for by name.
import assert from "node:assert/strict";
import { collectFile, ContainerProxy, getSandbox, isProcess, parseSSEStream, proxyToSandbox, Sandbox as Cloudflares } from "@cloudflare/sandbox";

export { ContainerProxy };

export class Sandbox extends Cloudflares {
  envVars = { OF_CLASS: "yes" };
}

/** One that wants to decide what its sandbox reaches. */
export class Guarded extends Cloudflares {
  allowedHosts = ["example.com"];
}

async function all(stream) {
  const events = [];
  for await (const event of parseSSEStream(stream)) events.push(event);
  return events;
}

const refusal = (work) => work.then(() => assert.fail("it was not refused"), (error) => error);
const upgrade = (path) => new Request(`http://localhost${path}`, { headers: { Upgrade: "websocket", Connection: "Upgrade" } });

const checks = {
  async commands(sandbox) {
    const { stdout, stderr, exitCode } = await sandbox.exec("echo $A $OF_CLASS; pwd; echo err >&2; false", { env: { A: "1" }, cwd: "/tmp" });
    assert.deepEqual([stdout, stderr, exitCode], ["1 yes\n/tmp", "err", 1]);
    assert.equal((await all(await sandbox.execStream("echo a; exit 4"))).at(-1).exitCode, 4);
    assert.match((await refusal(sandbox.exec("sleep 60", { timeout: 200 }))).message, /Command timeout after 200ms/);
    assert.match((await refusal(sandbox.exec("exit 3"))).message, /exit code: 3/);
    await sandbox.setEnvVars({ KEPT: "it's", GONE: "x" });
    await sandbox.setEnvVars({ GONE: undefined });
    assert.equal((await sandbox.exec("echo $KEPT$GONE")).stdout, "it's");
  },

  async processes(sandbox) {
    const server = await sandbox.startProcess("echo ready in 5 ms; exec python3 -m http.server 8101", { processId: "web" });
    assert.ok(isProcess(server));
    assert.equal((await server.waitForLog(/ready in (\d+) ms/)).match[1], "5");
    await server.waitForPort(8101);
    assert.equal(await server.getStatus(), "running");
    assert.match((await sandbox.getProcessLogs("web")).stdout, /ready in/);
    assert.equal(await (await sandbox.containerFetch(new Request("http://x/none"), 8101)).status, 404);
    await sandbox.killProcess("web");
    assert.equal((await sandbox.getProcess("web")).status, "killed");
    const ended = await sandbox.startProcess("echo out; exit 5");
    assert.equal((await ended.waitForExit()).exitCode, 5);
    assert.equal((await all(await sandbox.streamProcessLogs(ended.id))).at(-1).exitCode, 5);
    await sandbox.startProcess("sleep 100");
    assert.equal(await sandbox.killAllProcesses(), 1);
    assert.equal((await sandbox.listProcesses()).length, 3);
  },

  async files(sandbox) {
    await sandbox.mkdir("/workspace/d/e", { recursive: true });
    await sandbox.writeFile("/workspace/d/t.txt", "text");
    await sandbox.renameFile("/workspace/d/t.txt", "/workspace/d/u.txt");
    await sandbox.moveFile("/workspace/d/u.txt", "/workspace/d/e/u.txt");
    assert.equal((await sandbox.readFile("/workspace/d/e/u.txt")).content, "text");
    assert.deepEqual((await sandbox.listFiles("/workspace/d", { recursive: true })).files.map((file) => file.relativePath).sort(), ["e", "e/u.txt"]);
    await sandbox.exec("head -c 300000 /dev/urandom > /tmp/r");
    assert.equal((await collectFile(await sandbox.readFileStream("/tmp/r"))).content.length, 300000);
    await sandbox.deleteFile("/workspace/d/e/u.txt");
    assert.equal((await sandbox.exists("/workspace/d/e/u.txt")).exists, false);
    assert.match((await refusal(sandbox.readFile("/workspace/nope"))).message, /not found/i);
    const { version } = await sandbox.checkChanges("/workspace/d");
    const stream = await sandbox.watch("/workspace/d");
    await sandbox.writeFile("/workspace/d/new", "x");
    for await (const event of parseSSEStream(stream)) if (event.type === "event" && event.path === "/workspace/d/new") break;
    assert.equal((await sandbox.checkChanges("/workspace/d", { since: version })).status, "changed");
    await sandbox.exec("git init -q -b main /tmp/origin && cd /tmp/origin && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m one");
    assert.equal((await sandbox.gitCheckout("file:///tmp/origin", { targetDir: "/workspace/clone", branch: "main" })).targetDir, "/workspace/clone");
  },

  async sessions(sandbox) {
    const session = await sandbox.createSession({ id: "s1", cwd: "/tmp", env: { B: "2" } });
    await session.exec("cd /usr; C=3");
    assert.equal((await (await sandbox.getSession("s1")).exec("echo $PWD $B $C")).stdout, "/usr 2 3");
    assert.equal((await sandbox.deleteSession("s1")).sessionId, "s1");
    const [{ stdout }] = await Promise.all([sandbox.exec("echo one"), sandbox.exec("echo two")]);
    assert.equal(stdout, "one");
  },

  async code(sandbox) {
    const context = await sandbox.createCodeContext({ language: "python" });
    assert.equal((await sandbox.runCode("x = 6\nx * 7", { context })).results[0].text, "42");
    assert.equal((await sandbox.runCode("1/0", { context })).error.name, "ZeroDivisionError");
    assert.ok((await all(await sandbox.runCodeStream("print(x)", { context }))).some((event) => event.type === "stdout"));
    assert.equal((await sandbox.listCodeContexts()).length, 1);
    await sandbox.deleteCodeContext(context.id);
  },

  async sockets(sandbox) {
    await sandbox.writeFile("/tmp/echo.mjs", ECHO);
    const echo = await sandbox.startProcess("node /tmp/echo.mjs 8104");
    await echo.waitForPort(8104, { mode: "tcp" });
    const { webSocket: socket } = await sandbox.wsConnect(upgrade("/chat?a=b"), 8104);
    const said = new Promise((resolve) => socket.addEventListener("message", ({ data }) => resolve(data)));
    socket.accept();
    assert.equal(await said, "path /chat?a=b");
    socket.close();
    const { webSocket: terminal } = await sandbox.terminal(upgrade("/"), { cols: 91, rows: 24 });
    let seen = "";
    const shown = new Promise((resolve) => {
      terminal.addEventListener("message", async ({ data }) => {
        if (typeof data !== "string") seen += await new Response(data).text();
        else if (JSON.parse(data).type === "ready") terminal.send(new TextEncoder().encode("echo cols=$(tput cols)=\n"));
        if (seen.includes("cols=91=")) resolve();
      });
    });
    terminal.accept();
    await shown;
    terminal.close();
  },

  async transports(sandbox) {
    for (const transport of ["websocket", "rpc", "http"]) {
      await sandbox.setTransport(transport);
      assert.equal((await sandbox.exec("echo over")).stdout, "over");
      await sandbox.writeFile("/tmp/t", transport);
      assert.equal((await sandbox.readFile("/tmp/t")).content, transport);
      assert.match((await refusal(sandbox.readFile("/nope"))).message, /not found/i);
      assert.equal((await all(await sandbox.execStream("echo a; echo b"))).at(-1).type, "complete");
    }
  },

  async backups(sandbox, env) {
    await sandbox.writeFile("/workspace/b/kept", "1");
    await sandbox.writeFile("/workspace/b/left.log", "1");
    const backup = await sandbox.createBackup({ dir: "/workspace/b", name: "n", excludes: ["*.log"], localBucket: true });
    assert.ok(await env.BACKUP_BUCKET.head(`backups/${backup.id}/data.sqsh`));
    await sandbox.deleteFile("/workspace/b/kept");
    assert.deepEqual(await sandbox.restoreBackup(backup), { success: true, dir: "/workspace/b", id: backup.id });
    assert.equal((await sandbox.readFile("/workspace/b/kept")).content, "1");
    await sandbox.restoreBackup({ ...backup, dir: "/workspace/elsewhere" });
    assert.deepEqual((await sandbox.listFiles("/workspace/elsewhere")).files.map((file) => file.name), ["kept"]);
    assert.match((await refusal(sandbox.restoreBackup({ ...backup, id: crypto.randomUUID() }))).message, /not found/i);
  },

  async buckets(sandbox, env) {
    await env.DATA.put("from-outside", "one");
    await sandbox.mountBucket("DATA", "/workspace/data", { localBucket: true });
    assert.equal((await sandbox.readFile("/workspace/data/from-outside")).content, "one");
    // The SDK does not say when it begins to watch, and what was written before that stays where it is.
    for (let tries = 0; !(await env.DATA.head("from-inside")); tries++) {
      assert.ok(tries < 200, "what is written inside reaches the bucket");
      await sandbox.writeFile("/workspace/data/from-inside", "two");
      await scheduler.wait(20);
    }
    await sandbox.unmountBucket("/workspace/data");
    assert.match((await refusal(sandbox.unmountBucket("/workspace/data"))).message, /No active mount/);
    await sandbox.mountBucket(env.S3_BUCKET, "/own", { endpoint: env.S3_ENDPOINT, prefix: "/workerd/" });
    await sandbox.writeFile("/own/file", "by a Worker");
    await sandbox.unmountBucket("/own");
    assert.equal((await sandbox.exists("/own/file")).exists, false);
    await sandbox.mountBucket(env.S3_BUCKET, "/own", { endpoint: env.S3_ENDPOINT, readOnly: true });
    assert.equal((await sandbox.readFile("/own/workerd/file")).content, "by a Worker");
    await sandbox.unmountBucket("/own");
  },

  async rules(sandbox, env) {
    await sandbox.exec("true");
    assert.match((await refusal(sandbox.setAllowedHosts(["example.com"]))).message, /Skerry's rules/);
    assert.match((await refusal(getSandbox(env.Guarded, "guarded").start())).message, /Container failed to start/);
  },

  async lifecycle(sandbox) {
    await sandbox.setKeepAlive(true);
    await sandbox.setSleepAfter("3m");
    await sandbox.writeFile("/workspace/file", "1");
    assert.equal((await sandbox.getState()).status, "healthy");
    assert.equal(await sandbox.getContainerPlacementId(), null);
    await sandbox.stop();
    // stop() only sends a signal; until the container has ended, it is asked in vain.
    while (!(await sandbox.getState()).status.startsWith("stopped")) await scheduler.wait(5);
    assert.equal((await sandbox.exec("ls /workspace; echo again")).stdout, "again", "as at Cloudflare, files go with the container");
    await sandbox.writeFile("/workspace/file", "2");
    await sandbox.destroy();
    assert.equal((await sandbox.exists("/workspace/file")).exists, false);
  },
};

export default {
  async fetch(request, env) {
    const preview = await proxyToSandbox(request, env);
    if (preview) return preview;
    const { pathname, searchParams } = new URL(request.url);
    const [what, name] = pathname.slice(1).split("/");
    const sandbox = getSandbox(env.Sandbox, searchParams.get("name"), { normalizeId: true });
    try {
      if (what === "check") await checks[name](sandbox, env);
      if (what === "expose") return Response.json(await sandbox.exposePort(8102, { hostname: "example.com", token: "tok_1" }));
      if (what === "serve") await (await sandbox.startProcess("python3 -m http.server 8102 -d /etc")).waitForPort(8102);
      if (what === "ports") return Response.json(await sandbox.getExposedPorts("example.com"));
      if (what === "unexpose") await sandbox.unexposePort(8102);
      if (what === "destroy") await sandbox.destroy();
      return new Response("done");
    } catch (error) {
      return new Response(error.stack ?? String(error), { status: 500 });
    }
  },
};

export const names = Object.keys(checks);
