// Methods to be called later. They last as long as this process.
import { randomUUID } from "node:crypto";

const LONGEST_TIMER = 2 ** 31 - 1;

export class Schedules {
  #object;
  #tasks = new Map();

  constructor(object) {
    this.#object = object;
  }

  add(when, callback, payload) {
    if (typeof callback !== "string") throw new Error("Callback must be a string (method name)");
    if (typeof this.#object[callback] !== "function") throw new Error(`this.${callback} is not a function`);
    const delayed = typeof when === "number";
    if (!delayed && !(when instanceof Date)) throw new Error("Invalid schedule type. 'when' must be a Date or number of seconds");
    const at = delayed ? Date.now() + when * 1000 : when.getTime();
    const type = delayed ? "delayed" : "scheduled";
    const task = { taskId: randomUUID(), callback, payload, type, time: Math.floor(at / 1000) };
    if (delayed) task.delayInSeconds = when;
    this.#wait(task, at);
    return task;
  }

  get(id) {
    return this.#tasks.get(id)?.task;
  }

  list(callback) {
    return [...this.#tasks.values()].map(({ task }) => task).filter((task) => task.callback === callback);
  }

  names() {
    return new Set([...this.#tasks.values()].map(({ task }) => task.callback));
  }

  delete(callback) {
    for (const [id, { task, timer }] of this.#tasks) {
      if (task.callback !== callback) continue;
      clearTimeout(timer);
      this.#tasks.delete(id);
    }
  }

  #wait(task, at) {
    const left = at - Date.now();
    const timer = setTimeout(() => (left > LONGEST_TIMER ? this.#wait(task, at) : this.#run(task)), Math.min(Math.max(left, 0), LONGEST_TIMER));
    this.#tasks.set(task.taskId, { task, timer });
  }

  async #run(task) {
    this.#tasks.delete(task.taskId);
    try {
      await this.#object[task.callback](task.payload, task);
    } catch (error) {
      console.error(`The scheduled ${task.callback} failed:`, error);
    }
  }
}
