export interface EngineOptions {
  /** Where to listen; give it to miniflare as `containerEngine: { localDocker: { socketPath: "unix://…" } }`. */
  socketPath: string;
  /** The address of the Skerry server. */
  url: string | URL;
  /** SKERRY_API_KEY of the environment unless given. */
  apiKey?: string;
}

export interface Engine {
  close(): Promise<void>;
}

/** A container engine for workerd whose containers are sandboxes of Skerry. */
export declare function startEngine(options: EngineOptions): Promise<Engine>;
