// @skerry/sandbox, as a program in plain Node uses it: what the SDK documents, method by method, on a running server.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, before, describe, test } from "node:test";
import {
  BackupNotFoundError,
  collectFile,
  getSandbox,
  InvalidBackupConfigError,
  InvalidMountConfigError,
  isExecResult,
  isProcess,
  MissingCredentialsError,
  parseSSEStream,
  ProcessExitedBeforeReadyError,
  proxyTerminal,
  proxyToSandbox,
  Sandbox,
  SessionTerminatedError,
  SkerryError,
  skerry,
  streamFile,
  UnsupportedInNodeError,
} from "@skerry/sandbox";
import { Miniflare } from "miniflare";

const { SKERRY_URL, SKERRY_API_KEY, NAME } = process.env;
const HOST = new URL(SKERRY_URL).host;
const sandbox = getSandbox(SKERRY_URL, NAME, { sleepAfter: "7m", labels: { team: "a" } });

async function native(path, method = "GET") {
  const answer = await fetch(`${SKERRY_URL}/v1/sandboxes${path}`, { method, headers: { authorization: `Bearer ${SKERRY_API_KEY}` } });
  return { status: answer.status, ...(await answer.json()) };
}

async function all(stream) {
  const events = [];
  for await (const event of parseSSEStream(stream)) events.push(event);
  return events;
}

const refusal = (work) => work.then(() => assert.fail("it was not refused"), (error) => error);

after(() => sandbox.destroy());

describe("where the server is", () => {
  test("a URL, an address with a key, an environment and a binding mean the same sandbox", async () => {
    await sandbox.writeFile("/tmp/here", "yes");
    const places = [{ url: SKERRY_URL, apiKey: SKERRY_API_KEY }, process.env, skerry(SKERRY_URL), { Sandbox: skerry(SKERRY_URL) }];
    for (const place of places) assert.equal((await getSandbox(place, NAME).readFile("/tmp/here")).content, "yes");
  });
  test("nonsense is refused with a sentence", () => {
    assert.throws(() => getSandbox({}, "x"), /Say where Skerry is/);
    assert.throws(() => getSandbox("ftp://somewhere", "x"), /begins with http/);
    assert.throws(() => getSandbox("http://user:secret@somewhere", "x"), (error) => !error.message.includes("secret"));
    assert.throws(() => getSandbox(SKERRY_URL, "-x"), { name: "SandboxSecurityError" });
    assert.throws(() => skerry(SKERRY_URL, { class: class {} }), TypeError);
  });
  test("a wrong key is told as such", async () => {
    const error = await refusal(getSandbox({ url: SKERRY_URL, apiKey: "wrong" }, NAME).exec("true"));
    assert.ok(error instanceof SkerryError);
    assert.deepEqual([error.status, error.code], [401, "unauthorized"]);
  });
  test("a server that is not there is told as such", async () => {
    const error = await refusal(getSandbox("http://127.0.0.1:9", NAME).exec("true"));
    assert.deepEqual([error.name, error.code, error.status], ["SkerryError", "unreachable", 0]);
  });
  test("names that are no ids of Skerry are sandboxes of their own", async () => {
    const [one, other] = [getSandbox(SKERRY_URL, `${NAME} Größe@x`), getSandbox(SKERRY_URL, `${NAME} größe@x`)];
    await one.writeFile("/tmp/who", "one");
    assert.equal((await other.exists("/tmp/who")).exists, false);
    await Promise.all([one.destroy(), other.destroy()]);
  });
});

describe("commands", () => {
  test("exec, with its options, and with output as it comes", async () => {
    const result = await sandbox.exec("echo $A; pwd; echo err >&2", { env: { A: "1" }, cwd: "/tmp" });
    assert.ok(isExecResult(result));
    assert.deepEqual([result.stdout, result.stderr, result.exitCode, result.success], ["1\n/tmp", "err", 0, true]);
    const seen = [];
    const streamed = await sandbox.exec("echo a; echo b >&2", { stream: true, onOutput: (...one) => seen.push(one) });
    assert.deepEqual(seen.sort(), [["stderr", "b\n"], ["stdout", "a\n"]]);
    assert.equal(streamed.exitCode, 0);
  });
  test("execStream, also of a command that exits", async () => {
    const events = await all(await sandbox.execStream("echo a; exit 4"));
    assert.deepEqual(events.map((event) => event.type), ["start", "stdout", "complete"]);
    assert.equal(events.at(-1).exitCode, 4);
  });
  test("a timeout, a shell that ends, and no session at all", async () => {
    assert.equal((await refusal(sandbox.exec("sleep 60", { timeout: 200 }))).code, "COMMAND_EXECUTION_ERROR");
    const ended = await refusal(sandbox.exec("exit 3"));
    assert.ok(ended instanceof SessionTerminatedError);
    assert.equal(ended.exitCode, 3);
    const bare = getSandbox(SKERRY_URL, NAME, { enableDefaultSession: false });
    assert.deepEqual((({ stdout, exitCode }) => [stdout, exitCode])(await bare.exec("cd /tmp; echo a; exit 2")), ["a\n", 2]);
  });
  test("a command that is aborted ends, and the session is free", async () => {
    const began = Date.now();
    await assert.rejects(sandbox.exec("echo $$; sleep 602", { signal: AbortSignal.timeout(200) }), /abort/i);
    assert.equal((await sandbox.exec("pgrep -fx 'sleep 602'")).exitCode, 1);
    await assert.rejects(sandbox.exec("touch /tmp/never", { signal: AbortSignal.abort() }), /abort/i);
    assert.equal((await sandbox.exists("/tmp/never")).exists, false);
    assert.ok(Date.now() - began < 30_000);
  });
  test("variables of the sandbox are set and unset", async () => {
    await sandbox.setEnvVars({ KEPT: "it's", GONE: "x" });
    assert.equal((await sandbox.exec("echo $KEPT$GONE")).stdout, "it'sx");
    await sandbox.setEnvVars({ GONE: undefined });
    assert.equal((await sandbox.exec("echo $KEPT$GONE")).stdout, "it's");
  });
});

describe("processes", () => {
  test("are started, waited for, read and killed", async () => {
    const server = await sandbox.startProcess("echo ready in 5 ms; exec python3 -m http.server 8101", { processId: "web" });
    assert.ok(isProcess(server));
    assert.equal((await server.waitForLog(/ready in (\d+) ms/)).match[1], "5");
    await server.waitForPort(8101);
    assert.equal(await server.getStatus(), "running");
    assert.ok((await sandbox.listProcesses()).some((one) => one.id === "web"));
    assert.equal((await sandbox.getProcess("web")).pid, server.pid);
    assert.match((await sandbox.getProcessLogs("web")).stdout, /ready in/);
    await sandbox.killProcess("web");
    assert.equal((await sandbox.getProcess("web")).status, "killed");
    assert.equal(await sandbox.getProcess("nobody"), null);
  });
  test("say how they ended", async () => {
    const process = await sandbox.startProcess("echo out; exit 5");
    assert.equal((await process.waitForExit()).exitCode, 5);
    const events = await all(await sandbox.streamProcessLogs(process.id));
    assert.deepEqual([events.find((event) => event.type === "stdout").data, events.at(-1).exitCode], ["out\n", 5]);
    const early = await sandbox.startProcess("exit 1");
    const error = await refusal(early.waitForPort(8199, { timeout: 10_000 }));
    assert.ok(error instanceof ProcessExitedBeforeReadyError, error.stack);
    await sandbox.startProcess("sleep 100");
    assert.equal(await sandbox.killAllProcesses(), 1);
    assert.equal(await sandbox.cleanupCompletedProcesses(), 0);
  });
});

describe("files", () => {
  test("written, read, listed, moved and deleted", async () => {
    await sandbox.mkdir("/workspace/d/e", { recursive: true });
    await sandbox.writeFile("/workspace/d/a.bin", Buffer.from([0, 255]).toString("base64"), { encoding: "base64" });
    assert.deepEqual(Buffer.from((await sandbox.readFile("/workspace/d/a.bin", { encoding: "base64" })).content, "base64"), Buffer.from([0, 255]));
    await sandbox.writeFile("/workspace/d/t.txt", "text");
    await sandbox.renameFile("/workspace/d/t.txt", "/workspace/d/u.txt");
    await sandbox.moveFile("/workspace/d/u.txt", "/workspace/d/e/u.txt");
    const { files } = await sandbox.listFiles("/workspace/d", { recursive: true });
    assert.deepEqual(files.map((file) => file.relativePath).sort(), ["a.bin", "e", "e/u.txt"]);
    await sandbox.deleteFile("/workspace/d/e/u.txt");
    assert.equal((await sandbox.exists("/workspace/d/e/u.txt")).exists, false);
    const missing = await refusal(sandbox.readFile("/workspace/nope"));
    assert.deepEqual([missing.name, missing.code, missing.httpStatus], ["FileNotFoundError", "FILE_NOT_FOUND", 404]);
  });
  test("streamed, whole", async () => {
    await sandbox.exec("head -c 300000 /dev/urandom > /tmp/r; sha256sum < /tmp/r > /tmp/s");
    const { content, metadata } = await collectFile(await sandbox.readFileStream("/tmp/r"));
    assert.deepEqual([content.length, metadata.size], [300000, 300000]);
    let length = 0;
    for await (const chunk of streamFile(await sandbox.readFileStream("/tmp/r"))) length += chunk.length;
    assert.equal(length, 300000);
  });
  test("watched, and asked about", async () => {
    await sandbox.mkdir("/workspace/w");
    const { version } = await sandbox.checkChanges("/workspace/w");
    const stream = await sandbox.watch("/workspace/w");
    await sandbox.writeFile("/workspace/w/new", "x");
    for await (const event of parseSSEStream(stream)) if (event.type === "event" && event.path === "/workspace/w/new") break;
    assert.equal((await sandbox.checkChanges("/workspace/w", { since: version })).status, "changed");
  });
  test("checked out of git", async () => {
    await sandbox.exec("git init -q -b main /tmp/origin && cd /tmp/origin && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m one");
    const { targetDir, branch } = await sandbox.gitCheckout("file:///tmp/origin", { targetDir: "/workspace/clone", branch: "main" });
    assert.deepEqual([targetDir, branch], ["/workspace/clone", "main"]);
    assert.equal((await sandbox.exec("git -C /workspace/clone log --format=%s")).stdout, "one");
    assert.match((await refusal(sandbox.gitCheckout("file:///nope/x.git"))).code, /^GIT_/);
  });
});

describe("sessions", () => {
  test("keep their own state, and have the sandbox's methods", async () => {
    const session = await sandbox.createSession({ id: "s1", cwd: "/tmp", env: { B: "2" } });
    await session.exec("cd /usr; C=3");
    assert.equal((await session.exec("echo $PWD $B $C")).stdout, "/usr 2 3");
    await session.writeFile("/tmp/of-session", "x");
    await session.setEnvVars({ D: "4" });
    const again = await sandbox.getSession("s1");
    assert.equal((await again.exec("echo $D")).stdout, "4");
    assert.equal((await again.runCode("3 * 4")).results[0].text, "12");
    assert.deepEqual((await sandbox.deleteSession("s1")).sessionId, "s1");
    assert.match((await refusal(sandbox.deleteSession(`sandbox-${NAME}`))).message, /Cannot delete default session/);
  });
});

describe("code", () => {
  test("runs in contexts, streams, and fails as a result", async () => {
    const context = await sandbox.createCodeContext({ language: "python" });
    const printed = [];
    const run = await sandbox.runCode("x = 6\nprint('p')\nx * 7", { context, onStdout: (output) => void printed.push(output.text) });
    assert.equal(run.results[0].text, "42");
    assert.match(printed.join(""), /p\n/);
    assert.equal((await sandbox.runCode("x", { context })).results[0].text, "6");
    assert.equal((await sandbox.runCode("1/0", { context })).error.name, "ZeroDivisionError");
    assert.equal((await sandbox.runCode("[1, 2].map((n) => n * 2)", { language: "javascript" })).error, undefined);
    const events = await all(await sandbox.runCodeStream("print('s')", { context }));
    assert.ok(events.some((event) => event.type === "stdout"));
    assert.ok((await sandbox.listCodeContexts()).some((one) => one.id === context.id));
    await sandbox.deleteCodeContext(context.id);
  });
});

describe("code and its options", () => {
  test("time, variables and a signal hold, of the sandbox and of a session", async () => {
    const context = await sandbox.createCodeContext({ language: "python" });
    await sandbox.runCode("import os, time\nx = 7", { context });
    for (const runner of [sandbox, await sandbox.createSession({ id: "runner" })]) {
      const late = await runner.runCode("time.sleep(60)", { context, timeout: 300 });
      assert.match(`${late.error?.name} ${late.error?.message}`, /time/i);
      await assert.rejects(runner.runCode("time.sleep(60)", { context, signal: AbortSignal.timeout(200) }), /abort/i);
      const named = await runner.runCode("os.environ['TIDE'], x", { context, envVars: { TIDE: "low" } });
      assert.equal(named.results[0].text, "('low', 7)");
    }
    await sandbox.deleteCodeContext(context.id);
    const hasty = await sandbox.createCodeContext({ language: "python", timeout: 300 });
    assert.match((await sandbox.runCode("import time; time.sleep(60)", { context: hasty })).error.message, /0.3 seconds/);
    await sandbox.deleteCodeContext(hasty.id);
  });
});

describe("ports", () => {
  before(async () => {
    await sandbox.writeFile("/workspace/site/index.html", "<p>hello</p>");
    const server = await sandbox.startProcess("python3 -m http.server 8102 -d /workspace/site");
    await server.waitForPort(8102);
  });
  test("requests go straight to a port inside", async () => {
    assert.equal(await (await sandbox.containerFetch("http://x/index.html", 8102)).text(), "<p>hello</p>");
    assert.equal((await sandbox.containerFetch(new Request("http://x/none"), 8102)).status, 404);
    assert.equal((await sandbox.containerFetch("http://x/", { method: "POST", body: new URLSearchParams({ a: "1" }) }, 8102)).status, 501);
    await sandbox.startAndWaitForPorts({ ports: [8102] });
  });
  test("a preview URL works in the server, and through proxyToSandbox", async () => {
    const exposed = await sandbox.exposePort(8102, { hostname: HOST.replace("127.0.0.1", "localhost"), name: "site", token: "tok_1" });
    assert.deepEqual([exposed.port, exposed.name], [8102, "site"]);
    assert.equal(new URL(exposed.url).host, `8102-${NAME}-tok_1.localhost:${new URL(SKERRY_URL).port}`);
    assert.deepEqual(await sandbox.getExposedPorts("localhost"), [{ url: exposed.url, port: 8102, status: "active" }]);
    assert.equal((await sandbox.getExposedPorts("example.com"))[0].url, `https://8102-${NAME}-tok_1.example.com/`);
    assert.deepEqual([await sandbox.isPortExposed(8102), await sandbox.isPortExposed(8103)], [true, false]);
    assert.deepEqual([await sandbox.validatePortToken(8102, "tok_1"), await sandbox.validatePortToken(8102, "tok_2")], [true, false]);
    const proxied = await proxyToSandbox(new Request(`https://8102-${NAME}-tok_1.example.com/index.html`), process.env);
    assert.equal(await proxied.text(), "<p>hello</p>");
    const wrong = await proxyToSandbox(new Request(`https://8102-${NAME}-tok_2.example.com/`), process.env);
    assert.deepEqual([wrong.status, (await wrong.json()).code], [404, "INVALID_TOKEN"]);
    assert.equal(await proxyToSandbox(new Request("https://example.com/"), process.env), null);
    assert.equal((await sandbox.exposePort(8102, { hostname: "localhost" })).url, exposed.url, "an address stays what it is");
    await sandbox.unexposePort(8102);
    await sandbox.unexposePort(8102);
    assert.equal(await sandbox.isPortExposed(8102), false);
  });
  test("what cannot be exposed is refused as ever", async () => {
    assert.equal((await refusal(sandbox.exposePort(3000, { hostname: "localhost" }))).name, "SandboxSecurityError");
    assert.equal((await refusal(sandbox.exposePort(8102, { hostname: "localhost", token: "NO!" }))).name, "SandboxSecurityError");
    assert.equal((await refusal(sandbox.exposePort(8102, { hostname: "x.workers.dev" }))).code, "CUSTOM_DOMAIN_REQUIRED");
  });
  test("a tunnel is a preview URL", async () => {
    const tunnel = await sandbox.tunnels.get(8102, { name: "site" });
    assert.deepEqual([tunnel.port, tunnel.name, (await sandbox.tunnels.get(8102)).url], [8102, "site", tunnel.url]);
    assert.equal((await sandbox.tunnels.list()).length, 1);
    await sandbox.tunnels.destroy(tunnel);
    assert.equal((await sandbox.tunnels.list()).length, 0);
    assert.equal((await sandbox.tunnels.get(8102, { name: "site" })).url, tunnel.url);
    assert.match((await sandbox.tunnels.get(8102, { name: "other-site" })).hostname, /-other_site\./);
    await sandbox.tunnels.destroy(8102);
  });
});

describe("WebSockets", () => {
  const upgrade = (path = "/") => new Request(`http://localhost${path}`, { headers: { Upgrade: "websocket", Connection: "Upgrade" } });

  test("a terminal, of the sandbox and of a session", async () => {
    for (const owner of [sandbox, await sandbox.createSession({ id: "term" })]) {
      const answer = await owner.terminal(upgrade(), { cols: 91, rows: 24 });
      assert.equal(answer.status, 101);
      const socket = answer.webSocket;
      let seen = "";
      const shown = new Promise((resolve) => {
        socket.addEventListener("message", ({ data }) => {
          if (typeof data === "string" && JSON.parse(data).type === "ready") socket.send(new TextEncoder().encode("echo cols=$(tput cols)=\n"));
          if (typeof data !== "string") seen += Buffer.from(data).toString();
          if (seen.includes("cols=91=")) resolve();
        });
      });
      socket.accept();
      await shown;
      socket.close();
    }
    assert.match((await refusal(sandbox.terminal(new Request("http://localhost/")))).message, /WebSocket upgrade/);
    assert.equal((await proxyTerminal(sandbox, "term", upgrade(), { cols: 91, rows: 24 })).status, 101);
  });
  test("one to a server inside, whose port is open for nobody else and only meanwhile", async () => {
    await sandbox.writeFile("/tmp/echo.mjs", await readFile(new URL("./echo.mjs", import.meta.url), "utf8"));
    const echo = await sandbox.startProcess("node /tmp/echo.mjs 8104", { processId: "echo" });
    await echo.waitForPort(8104, { mode: "tcp", timeout: 20_000 });
    const { webSocket: socket, status } = await sandbox.wsConnect(upgrade("/chat?a=b"), 8104);
    assert.equal(status, 101);
    const first = new Promise((resolve) => socket.addEventListener("message", ({ data }) => resolve(data), { once: true }));
    socket.accept();
    assert.equal(await first, "path /chat?a=b");
    assert.equal(await sandbox.isPortExposed(8104), false);
    const closed = new Promise((resolve) => socket.addEventListener("close", resolve));
    socket.close();
    await closed;
    for (let tries = 0; tries < 500 && (await native(`/${NAME}/ports`)).ports.length; tries++);
    assert.deepEqual((await native(`/${NAME}/ports`)).ports, []);
    const { webSocket: second } = await sandbox.wsConnect(upgrade(), 8104);
    await sandbox.exposePort(8104, { hostname: "localhost" });
    const gone = new Promise((resolve) => second.addEventListener("close", resolve));
    second.close();
    await gone;
    for (let tries = 0; tries < 20; tries++) assert.equal(await sandbox.isPortExposed(8104), true, "what was exposed meanwhile stays so");
    await sandbox.unexposePort(8104);
    assert.equal((await refusal(sandbox.wsConnect(upgrade(), 3000))).name, "SandboxSecurityError");
  });
  test("the other transports", async () => {
    for (const transport of ["websocket", "rpc"]) {
      const other = getSandbox(skerry(SKERRY_URL, { env: { SANDBOX_TRANSPORT: transport } }), NAME);
      assert.equal((await other.exec("echo over")).stdout, "over");
      await other.writeFile("/tmp/t", transport);
      assert.equal((await other.readFile("/tmp/t")).content, transport);
      assert.equal((await refusal(other.readFile("/nope"))).code, "FILE_NOT_FOUND");
      assert.equal((await all(await other.execStream("echo a; echo b"))).at(-1).type, "complete");
      if (transport === "rpc") {
        const { content } = await other.readFile("/tmp/t", { encoding: "none" });
        assert.equal(await new Response(content).text(), "rpc");
      }
      await other.setTransport("http");
      assert.equal((await other.exec("echo back")).stdout, "back");
    }
  });
});

describe("buckets and backups", () => {
  test("a directory is backed up, and restored here or elsewhere", async () => {
    await sandbox.writeFile("/workspace/b/kept", "1");
    await sandbox.writeFile("/workspace/b/left.log", "1");
    const backup = JSON.parse(JSON.stringify(await sandbox.createBackup({ dir: "/workspace/b", name: "n", ttl: 3600, excludes: ["**/*.log"] })));
    assert.deepEqual(Object.keys(backup), ["id", "dir"]);
    await sandbox.deleteFile("/workspace/b/kept");
    assert.deepEqual(await sandbox.restoreBackup(backup), { success: true, dir: "/workspace/b", id: backup.id });
    assert.equal((await sandbox.exists("/workspace/b/kept")).exists, true);
    assert.equal((await sandbox.exists("/workspace/b/left.log")).exists, false);
    await sandbox.restoreBackup({ ...backup, dir: "/workspace/elsewhere" });
    assert.equal((await sandbox.exists("/workspace/elsewhere/kept")).exists, true);
    const session = await sandbox.createSession({ id: "keeper" });
    assert.equal((await session.restoreBackup(await session.createBackup({ dir: "/workspace/b" }))).success, true);
  });
  test("what cannot be backed up or restored has its own error", async () => {
    for (const options of [{ dir: "/etc" }, { dir: "/workspace", ttl: 0 }, { dir: "/workspace", excludes: "x" }, { dir: "/workspace", compression: { format: "rar" } }])
      assert.ok((await refusal(sandbox.createBackup(options))) instanceof InvalidBackupConfigError);
    assert.ok((await refusal(sandbox.restoreBackup({ id: "20200101T000000-00000000", dir: "/workspace" }))) instanceof BackupNotFoundError);
  });
  test("a bucket of the server's is mounted; one that it does not know is not", async () => {
    await sandbox.mountBucket("default", "/data", { endpoint: "https://s3.example.com", prefix: `/${NAME}`, credentials: { accessKeyId: "a", secretAccessKey: "b" } });
    await sandbox.writeFile("/data/file", "in the bucket");
    assert.match((await sandbox.exec("grep ' /data ' /proc/mounts")).stdout, /fuse/);
    await sandbox.unmountBucket("/data");
    assert.equal((await sandbox.exists("/data/file")).exists, false);
    for (const work of [sandbox.unmountBucket("/data"), sandbox.mountBucket("nobodys", "/data", {}), sandbox.mountBucket("default", "data", {})])
      assert.ok((await refusal(work)) instanceof InvalidMountConfigError);
  });
});

describe("buckets that the server does not know", () => {
  const { S3_ENDPOINT: endpoint, S3_BUCKET: bucket, S3_KEY: accessKeyId, S3_SECRET: secretAccessKey } = process.env;
  const credentials = { accessKeyId, secretAccessKey };
  const mounted = async (binding, path) => (await binding.exec(`grep ' ${path} ' /proc/mounts`)).stdout;

  test("come with an endpoint and credentials", async () => {
    await sandbox.mountBucket(bucket, "/own", { endpoint, credentials, prefix: "/node/" });
    await sandbox.writeFile("/own/file", "by Node");
    await sandbox.unmountBucket("/own");
    await sandbox.mountBucket(bucket, "/own", { endpoint, credentials, readOnly: true });
    assert.equal((await sandbox.readFile("/own/node/file")).content, "by Node");
    await sandbox.unmountBucket("/own");
    const wrong = { endpoint, credentials: { accessKeyId, secretAccessKey: "another" } };
    assert.ok((await refusal(sandbox.mountBucket(bucket, "/own", wrong))) instanceof InvalidMountConfigError);
    const elsewhere = { endpoint: "http://169.254.169.254", credentials };
    assert.ok((await refusal(sandbox.mountBucket(bucket, "/own", elsewhere))) instanceof InvalidMountConfigError);
    assert.ok((await refusal(sandbox.mountBucket(bucket, "/own", { endpoint }))) instanceof MissingCredentialsError);
  });
  test("or as a binding of env: a name, an address, or a real one", async () => {
    const miniflare = new Miniflare({ modules: true, script: "export default {}", r2Buckets: ["REAL"] });
    const env = { NAMED: "default", ADDRESSED: { bucket, endpoint, credentials }, REAL: await miniflare.getR2Bucket("REAL") };
    const bound = getSandbox(skerry(SKERRY_URL, { env }), NAME);
    await bound.mountBucket("NAMED", "/named", { prefix: `/${NAME}/bound` });
    await bound.mountBucket("ADDRESSED", "/addressed", {});
    assert.match(await mounted(bound, "/named"), /fuse/);
    assert.equal((await bound.readFile("/addressed/node/file")).content, "by Node");
    await env.REAL.put("from-outside", "one");
    await bound.mountBucket("REAL", "/workspace/real", {});
    assert.equal((await bound.readFile("/workspace/real/from-outside")).content, "one");
    for (const path of ["/named", "/addressed", "/workspace/real"]) await bound.unmountBucket(path);
    await miniflare.dispose();
  });
});

describe("lifecycle", () => {
  test("settings reach the server", async () => {
    const settings = ({ sleepAfter, keepAlive, labels }) => [sleepAfter, keepAlive, labels];
    assert.deepEqual(settings(await native(`/${NAME}`)), [420, false, { team: "a" }]);
    await sandbox.setKeepAlive(true);
    await sandbox.setSleepAfter(90);
    await sandbox.setLabels({ team: "b" });
    assert.deepEqual(settings(await native(`/${NAME}`)), [90, true, { team: "b" }]);
    await sandbox.setContainerTimeouts({ portReadyTimeoutMS: 20_000 });
    assert.match((await refusal(sandbox.setContainerTimeouts({ portReadyTimeoutMS: 1 }))).message, /must be between/);
    assert.equal(await sandbox.getContainerPlacementId(), null);
  });
  test("one of a class of one's own starts with its hooks, stops, starts and is destroyed", async () => {
    const calls = [];
    class Mine extends Sandbox {
      sleepAfter = "3m";
      envVars = { OF_CLASS: "c" };

      async onStart() {
        await super.onStart();
        await this.exec("echo started >> /workspace/starts");
        calls.push("start");
      }

      async onStop(params) {
        await super.onStop(params);
        calls.push("stop");
      }

      remind(payload) {
        calls.push(payload);
      }
    }
    const mine = getSandbox(skerry(SKERRY_URL, { class: Mine }), `${NAME}-mine`);
    assert.equal((await mine.getState()).status, "stopped");
    const [starts, variable] = await Promise.all([mine.exec("cat /workspace/starts"), mine.exec("echo $OF_CLASS")]);
    assert.deepEqual([starts.stdout, variable.stdout, (await mine.getState()).status], ["started", "c", "healthy"]);
    assert.equal((await native(`/${NAME}-mine`)).sleepAfter, 180);
    await mine.stop();
    assert.equal((await mine.getState()).status, "stopped");
    assert.equal((await mine.exec("cat /workspace/starts")).stdout, "started\nstarted");
    const { taskId } = await mine.schedule(0, "remind", "later");
    assert.ok(taskId);
    await mine.exec("true");
    await mine.destroy();
    assert.equal((await native(`/${NAME}-mine`)).status, 404);
    assert.deepEqual(calls.filter((call) => call !== "later"), ["start", "stop", "start", "stop"]);
    assert.ok(calls.includes("later"));
  });
  test("many at once share one start", async () => {
    const shared = getSandbox(SKERRY_URL, `${NAME}-many`);
    const results = await Promise.all(Array.from({ length: 20 }, (_, n) => shared.exec(`echo ${n}`)));
    assert.deepEqual(results.map((result) => result.stdout), Array.from({ length: 20 }, (_, n) => String(n)));
    assert.equal((await native(`/${NAME}-many`)).starts, 1);
    await shared.destroy();
    assert.equal((await shared.exec("echo anew")).stdout, "anew");
    await shared.destroy();
  });
  test("what only a Worker can do is said to be so", async () => {
    for (const work of [sandbox.setOutboundHandler("x"), sandbox.setOutboundByHost("h", "x"), sandbox.setOutboundByHosts({})]) {
      const error = await refusal(work);
      assert.ok(error instanceof UnsupportedInNodeError);
      assert.equal(error.code, "UNSUPPORTED_IN_NODE");
    }
    assert.throws(() => skerry(SKERRY_URL, { class: class extends Sandbox { static outboundByHost = { h: () => {} }; } }), UnsupportedInNodeError);
  });
  test("a class whose rules cannot be held to has no sandbox that runs", async () => {
    class Guarded extends Sandbox {
      deniedHosts = ["ex*mple.com"];
    }
    const guarded = getSandbox(skerry(SKERRY_URL, { class: Guarded }), `${NAME}-guarded`);
    for (let tries = 0; tries < 2; tries++) assert.equal((await refusal(guarded.exec("true"))).code, "invalid_egress");
    assert.notEqual((await guarded.getState()).status, "healthy");
    await guarded.destroy();
  });
  test("the rules of a class hold before anything runs", async () => {
    class Guarded extends Sandbox {
      deniedHosts = ["example.com"];
      enableInternet = false;
    }
    const guarded = getSandbox(skerry(SKERRY_URL, { class: Guarded }), `${NAME}-ruled`);
    const rules = async () => {
      const { mode, allow, deny } = await native(`/${NAME}-ruled/egress`);
      return [mode, allow, deny];
    };
    await guarded.exec("true");
    assert.deepEqual(await rules(), ["none", [], ["example.com"]]);
    await guarded.allowHost("*.example.com");
    await guarded.denyHost("bad.example.com");
    await guarded.removeDeniedHost("example.com");
    assert.deepEqual(await rules(), ["allowlist", ["*.example.com"], ["bad.example.com"]]);
    const curl = "curl -sS -o /dev/null -w '%{http_code}' -m 20 http://bad.example.com/";
    assert.equal((await guarded.exec(curl)).stdout, "403");
    await guarded.destroy();
  });
  test("the hosts that may be reached are the server's to hold to", async () => {
    const policy = await native(`/${NAME}/egress`);
    if (policy.status === 404) return assert.ok((await refusal(sandbox.setAllowedHosts(["pypi.org"]))) instanceof UnsupportedInNodeError);
    await sandbox.setAllowedHosts(["pypi.org"]);
    await sandbox.allowHost("*.example.com");
    await sandbox.removeAllowedHost("pypi.org");
    const { mode, allow } = await native(`/${NAME}/egress`);
    assert.deepEqual([mode, allow.map((rule) => rule.host ?? rule)], ["allowlist", ["*.example.com"]]);
  });
});
