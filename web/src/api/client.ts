// Calls to the node. Commands carry the CSRF token of the session; problems (RFC 9457) become readable errors.

import type { SessionBody } from "./responses";

const READ_TIMEOUT_MS = 10_000;
const COMMAND_TIMEOUT_MS = 65_000; // saving or moving a model may take the node a minute

interface Problem {
  title?: string;
  detail?: string;
  action?: string; // what to do about it
  errors?: { location: string; message: string }[];
}

export class NodeError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly fields: Readonly<Record<string, string>> = {},
  ) {
    super(message);
  }
}

export class Client {
  private csrfToken: string | null = null;
  private readonly known = new Map<string, { tag: string; answer: unknown }>();

  /** Opens a session with a key, or renews that of the cookie; the token goes back with every command. */
  async openSession(key?: string): Promise<SessionBody> {
    const init = key === undefined ? {} : { method: "POST", body: JSON.stringify({ secret: key }) };
    const session = await this.json<SessionBody>("/api/session", init);
    this.csrfToken = session.csrf_token;
    return session;
  }

  /** An answer that has not changed since the last call (by its entity tag) is the same object again. */
  async get<T>(path: string): Promise<T> {
    const known = this.known.get(path);
    const response = await this.response(path, known ? { tag: known.tag } : {});
    if (response.status === 304 && known) return known.answer as T;
    const answer = (await response.json()) as T;
    const tag = response.headers.get("ETag");
    if (tag !== null) this.known.set(path, { tag, answer });
    return answer;
  }

  async command<T>(path: string, body: unknown, method = "POST"): Promise<T> {
    return this.renewed(() => this.json<T>(path, { method, body: JSON.stringify(body) }));
  }

  /** A file that the node makes for its owner. */
  async download(path: string): Promise<{ name: string; content: Blob }> {
    const init = { method: "POST", body: "{}" };
    const response = await this.renewed(() => this.response(path, init));
    const name = /filename="([\w.-]+)"/.exec(response.headers.get("Content-Disposition") ?? "")?.[1];
    return { name: name ?? "neuroshard-report.zip", content: await response.blob() };
  }

  async isAlive(): Promise<boolean> {
    try {
      await this.json("/health", {});
      return true;
    } catch (error) {
      return error instanceof NodeError && error.status > 0;
    }
  }

  /** A response with a live body, for streams; not bound to the usual time limit. */
  async open(path: string, body: unknown, signal: AbortSignal): Promise<Response> {
    const response = await fetch(path, { method: "POST", body: JSON.stringify(body), headers: this.headers(true), signal });
    if (!response.ok) throw await problem(response);
    return response;
  }

  /** When another tab has opened a new session, its token is read, once. */
  private async renewed<T>(call: () => Promise<T>): Promise<T> {
    try {
      return await call();
    } catch (error) {
      if (!(error instanceof NodeError) || (error.status !== 401 && error.status !== 403)) throw error;
      await this.openSession();
      return await call();
    }
  }

  private async json<T>(path: string, init: { method?: string; body?: string }): Promise<T> {
    return (await (await this.response(path, init)).json()) as T;
  }

  private async response(path: string, { tag, ...init }: { method?: string; body?: string; tag?: string }): Promise<Response> {
    const headers = this.headers(init.body !== undefined);
    if (tag !== undefined) headers["If-None-Match"] = tag;
    let response: Response;
    try {
      response = await fetch(path, {
        ...init,
        headers,
        cache: "no-store",
        signal: AbortSignal.timeout(init.body === undefined ? READ_TIMEOUT_MS : COMMAND_TIMEOUT_MS),
      });
    } catch {
      throw new NodeError("The node does not answer.", 0);
    }
    if (!response.ok && response.status !== 304) throw await problem(response);
    return response;
  }

  private headers(hasBody: boolean): Record<string, string> {
    const headers: Record<string, string> = { Accept: "application/json" };
    if (hasBody) headers["Content-Type"] = "application/json";
    if (this.csrfToken !== null) headers["X-NeuroShard-CSRF"] = this.csrfToken;
    return headers;
  }
}

async function problem(response: Response): Promise<NodeError> {
  try {
    const body = (await response.json()) as Problem;
    const fields = Object.fromEntries((body.errors ?? []).map(({ location, message }) => [location, message]));
    const words = [body.detail ?? body.title ?? response.statusText, body.action ?? ""];
    return new NodeError(words.filter(Boolean).join(" "), response.status, fields);
  } catch {
    return new NodeError(`The node answered ${response.status} ${response.statusText}.`, response.status);
  }
}
