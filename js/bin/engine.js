#!/usr/bin/env node
// skerry-engine COMMAND…: runs a command, `wrangler dev` for one, with sandboxes of Skerry where it expects containers of Docker.
import { spawn } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { constants, tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { startEngine } from "../lib/engine.js";

const [command, ...words] = process.argv.slice(2);
if (!command || command.startsWith("-")) {
  console.error("Usage: SKERRY_URL=http://127.0.0.1:8787 skerry-engine wrangler dev");
  process.exit(command === "--help" || command === "-h" ? 0 : 2);
}

const place = await mkdtemp(join(tmpdir(), "skerry-engine-"));
const socketPath = join(place, "docker.sock");
const engine = await startEngine({ socketPath, url: process.env.SKERRY_URL ?? "http://127.0.0.1:8787" });
const docker = fileURLToPath(new URL("./docker.js", import.meta.url));
const env = { ...process.env, WRANGLER_DOCKER_HOST: `unix://${socketPath}`, WRANGLER_DOCKER_BIN: docker };

const child = spawn(command, words, { stdio: "inherit", env });
// What a terminal sends reaches the command as well, and it decides when to end; the rest is passed on.
process.on("SIGINT", () => {});
for (const signal of ["SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
const code = await new Promise((resolve) => {
  child.on("error", (error) => {
    console.error(`${command} could not be started: ${error.message}`);
    resolve(127);
  });
  child.on("exit", (status, signal) => resolve(status ?? 128 + constants.signals[signal]));
});
await engine.close();
await rm(place, { recursive: true });
process.exit(code);
