// The genuine OpenAI Agents SDK for JavaScript, with its client for Cloudflare's bridge, against a running server.
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Manifest } from "@openai/agents-core/sandbox";
import { CloudflareSandboxClient } from "@openai/agents-extensions/sandbox/cloudflare";

const { URL: workerUrl, KEY: apiKey } = process.env;
const client = new CloudflareSandboxClient({ workerUrl, apiKey, timeoutMs: 20_000 });
const text = (bytes) => new TextDecoder().decode(bytes);
let session;

// What it answers is prose for a model: some lines of facts, then the output.
function parts(answer) {
  const code = /exited with code (-?\d+)/.exec(answer);
  return { code: code && Number(code[1]), output: answer.split(/\nOutput:\n/)[1] };
}
const run = async (cmd, more = {}) => parts(await session.execCommand({ cmd, ...more }));

before(async () => {
  session = await client.create({
    manifest: new Manifest({
      entries: { "README.md": { type: "file", content: "# hi\n" } },
      environment: { GREETING: { value: "it's \"quoted\"\nand long" } },
    }),
  });
});
after(() => session.close());

describe("commands", () => {
  test("output, errors and exit code", async () => {
    assert.deepEqual(await run("echo out; echo err >&2; exit 3"), { code: 3, output: "out\nerr" });
  });
  test("many lines, a here-document, a directory, the environment", async () => {
    const { output } = await run("cat <<'EOF' | tr a-z A-Z\nfirst\n  $second\nEOF\npwd; printf %s \"$GREETING\"", { workdir: "/workspace" });
    assert.equal(output, "FIRST\n  $SECOND\n/workspace\nit's \"quoted\"\nand long");
  });
  test("one that takes too long is ended", async () => {
    const hasty = await new CloudflareSandboxClient({ workerUrl, apiKey, timeoutMs: 500 }).create({});
    try {
      const { code, output } = parts(await hasty.execCommand({ cmd: "echo begun; sleep 976" }));
      assert.deepEqual([code, output], [124, "begun"]);
      assert.equal(parts(await hasty.execCommand({ cmd: "pgrep -fx 'sleep 976'" })).code, 1);
    } finally {
      await hasty.close();
    }
  });
});

describe("files", () => {
  test("those of the manifest, and those that are made", async () => {
    assert.equal(text(await session.readFile({ path: "README.md" })), "# hi\n");
    const editor = session.createEditor();
    await editor.createFile({ type: "create_file", path: "deep/er/ü b.txt", diff: "+one\n+zwei ü" });
    assert.match(text(await session.readFile({ path: "deep/er/ü b.txt" })), /one\nzwei ü/);
    assert.equal(await session.pathExists("deep/er"), true);
    assert.equal(await session.directoryExists("deep/er"), true);
    await editor.deleteFile({ type: "delete_file", path: "deep/er/ü b.txt" });
    assert.equal(await session.pathExists("deep/er/ü b.txt"), false);
  });
  test("bytes that are no text, and a part of them", async () => {
    await run("printf '\\377\\0\\1' >bytes");
    assert.deepEqual([...(await session.readFile({ path: "bytes" }))], [255, 0, 1]);
    assert.deepEqual([...(await session.readFile({ path: "bytes", maxBytes: 1 }))], [255]);
  });
  test("one that is not there, and one that is elsewhere", async () => {
    await assert.rejects(session.readFile({ path: "nope" }), /not found/);
    await assert.rejects(session.readFile({ path: "../etc/passwd" }));
  });
});

describe("life", () => {
  test("a terminal takes input, and says when it ended", async () => {
    const begun = await session.execCommand({ cmd: "read line; echo got:$line", tty: true, yieldTimeMs: 500 });
    const sessionId = Number(/session ID (\d+)/.exec(begun)[1]);
    assert.match(await session.writeStdin({ sessionId, chars: "hello\n", yieldTimeMs: 500 }), /got:hello/);
    const ended = await session.writeStdin({ sessionId, chars: "exit 7\n", yieldTimeMs: 3000 });
    assert.equal(parts(ended).code, 7);
  });
  test("a workspace is persisted and hydrated", async () => {
    await run("mkdir -p kept; echo one >kept/one; chmod 755 kept/one");
    const archive = await session.persistWorkspace();
    const other = await client.create({});
    try {
      await other.hydrateWorkspace(archive);
      const { output } = parts(await other.execCommand({ cmd: "cat kept/one README.md; stat -c %a kept/one" }));
      assert.equal(output, "one\n# hi\n755");
    } finally {
      await other.close();
    }
  });
  test("one that runs is resumed; one that was deleted is not", async () => {
    const other = await client.create({});
    await other.execCommand({ cmd: "echo 1 >kept" });
    assert.equal(await other.running(), true);
    const again = await client.resume(other.state);
    assert.equal(text(await again.readFile({ path: "kept" })), "1\n");
    await again.delete();
    assert.equal(await other.running(), false);
    await assert.rejects(client.resume(other.state), /no longer running/);
    await other.close();
  });
  test("a wrong key is refused in words", async () => {
    const stranger = new CloudflareSandboxClient({ workerUrl, apiKey: "another" });
    await assert.rejects(stranger.create({}), (error) => /create sandbox/.test(error.message) && /401|key/i.test(JSON.stringify(error) + error.message));
  });
  test("credentials for a bucket are refused with a reason", async () => {
    const options = { endpoint: "https://example.com", credentials: { accessKeyId: "a", secretAccessKey: "b" } };
    await assert.rejects(session.mountBucket({ bucket: "b", mountPath: "/workspace/data", options }), /mount failed/);
  });
});
