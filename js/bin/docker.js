#!/usr/bin/env node
// Stands in for the program `docker` where `wrangler dev` asks it for images: a sandbox of Skerry needs none.
const words = process.argv.slice(2);
if (words[0] === "--host") words.splice(0, 2);
const [verb, noun] = words;

if (verb === "--version") console.log("Docker version 0.0.0, build skerry");
else if (verb === "image" && noun === "inspect") console.log(1); // so many ports are exposed; every one can be reached
else if (verb === "build") process.stdin.resume();
else if (!["info", "pull", "ps", "rm", "rmi", "image", "images", "container"].includes(verb)) {
  console.error(`Here docker is Skerry's engine for development; it cannot ${verb ?? "do nothing"}. Run this command without skerry-engine.`);
  process.exitCode = 1;
}
