// The client is made for Workers: what it imports from there exists nowhere else, and plain Node needs whole file names.
import { register } from "node:module";

register("./hooks.mjs", import.meta.url);
