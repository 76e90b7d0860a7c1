// The SDK's Sandbox class in real workerd, in miniflare, with sandboxes of Skerry as its containers: nothing of it is replaced.
import assert from "node:assert/strict";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { build } from "esbuild";
import { Miniflare } from "miniflare";
import { startEngine } from "@skerry/sandbox/engine";

const { SKERRY_URL, SKERRY_API_KEY, S3_ENDPOINT, S3_BUCKET, S3_KEY, S3_SECRET } = process.env;
const GROUPS = ["commands", "processes", "files", "sessions", "code", "sockets", "transports", "backups", "buckets", "rules", "lifecycle"];
const durable = (className) => ({ className, useSQLite: true, container: { imageName: "skerry" } });
let engine, miniflare, place;

before(async () => {
  place = await mkdtemp(join(tmpdir(), "engine-"));
  const socketPath = join(place, "docker.sock");
  engine = await startEngine({ socketPath, url: SKERRY_URL, apiKey: SKERRY_API_KEY });
  const echo = await readFile(new URL("./echo.mjs", import.meta.url), "utf8");
  const { outputFiles } = await build({
    entryPoints: [new URL("./checks.mjs", import.meta.url).pathname],
    bundle: true,
    write: false,
    format: "esm",
    conditions: ["workerd"],
    mainFields: ["module", "main"],
    external: ["cloudflare:*", "node:*"],
    define: { ECHO: JSON.stringify(echo) },
  });
  miniflare = new Miniflare({
    modules: [{ type: "ESModule", path: "checks.mjs", contents: outputFiles[0].text }],
    compatibilityDate: "2026-04-01",
    compatibilityFlags: ["nodejs_compat"],
    bindings: { SANDBOX_LOG_LEVEL: "error", S3_ENDPOINT, S3_BUCKET, AWS_ACCESS_KEY_ID: S3_KEY, AWS_SECRET_ACCESS_KEY: S3_SECRET },
    durableObjects: { Sandbox: durable("Sandbox"), Guarded: durable("Guarded") },
    r2Buckets: ["BACKUP_BUCKET", "DATA"],
    containerEngine: { localDocker: { socketPath: `unix://${socketPath}` } },
    handleRuntimeStdio: (out, err) => void (out.resume(), err.resume()),
  });
  await miniflare.ready;
});

after(async () => {
  await miniflare?.dispose();
  await engine?.close();
  await rm(place, { recursive: true });
});

async function ask(path, name) {
  const answer = await miniflare.dispatchFetch(`http://worker/${path}?name=${name}`);
  const said = await answer.text();
  assert.equal(answer.status, 200, said);
  return said;
}

describe("the Sandbox class in workerd", () => {
  for (const name of GROUPS)
    test(name, async () => {
      await ask(`check/${name}`, name);
      await ask("destroy", name);
    });

  test("previews, and how they end", async () => {
    const preview = async (path = "hostname", token = "tok_1") => miniflare.dispatchFetch(`https://8102-ports-${token}.example.com/${path}`);
    await ask("serve", "ports");
    assert.equal(JSON.parse(await ask("expose", "ports")).url, "https://8102-ports-tok_1.example.com/");
    assert.equal((await preview()).status, 200);
    assert.equal(JSON.parse(await ask("ports", "ports")).length, 1);
    const wrong = await preview("", "tok_2");
    assert.deepEqual([wrong.status, (await wrong.json()).code], [404, "INVALID_TOKEN"]);
    await ask("unexpose", "ports");
    assert.equal((await preview()).status, 404);
    await ask("destroy", "ports");
  });

  test("nothing is left when all are destroyed", async () => {
    const headers = { authorization: `Bearer ${SKERRY_API_KEY}` };
    const { sandboxes } = await (await fetch(`${SKERRY_URL}/v1/sandboxes?prefix=workerd-`, { headers })).json();
    assert.deepEqual(sandboxes.map(({ id }) => id), []);
  });
});
