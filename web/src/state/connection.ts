// Keeps the store in step with the node: first answers, then events; notices when it is gone and comes back alone.

import type { LogLine, LogLines, LossHistory, LossPoint, PeersSummary, SessionBody } from "../api/responses";
import type { NodeStatus } from "../api/status";
import type { Client } from "../api/client";
import { NodeError } from "../api/client";
import type { Curve } from "../curve/series";
import type { Store } from "./store";

const SILENCE_MS = 12_000; // without a message for this long, /health decides
const HIDDEN_MS = 60_000; // a tab nobody looks at gives its connection back after this
const READ_MS = 2_000; // between two readings of the curve, the peers and the numbers of the run
const MAX_LOGS = 1_000;
const LONGEST_WAIT_SECONDS = 10;
export const KEY_HASH = "#key="; // of an address that opens a session, once

export class Connection {
  private source: EventSource | null = null;
  private retryTimer = 0;
  private hiddenTimer = 0;
  private lastMessage = 0;
  private failures = 0;
  private history: LossHistory | null = null; // the one that the curve was made from
  private busy = false;

  constructor(
    private readonly client: Client,
    private readonly store: Store,
  ) {}

  start(): void {
    void this.connect();
    setInterval(() => void this.watch(), 3_000);
    setInterval(() => void this.refresh(), READ_MS);
    document.addEventListener("visibilitychange", () => this.onVisibility());
    addEventListener("hashchange", () => {
      if (location.hash.startsWith(KEY_HASH)) void this.connect();
    });
  }

  /** Opens a session with a key that its reader has pasted: the key alone, or an address that contains it. */
  async enterWith(text: string): Promise<void> {
    await this.client.openSession(text.trim().split(KEY_HASH).pop());
    await this.connect();
  }

  /** First answers over plain calls, then the event stream. Also after the node was gone. */
  async connect(): Promise<void> {
    if (this.busy) return;
    this.busy = true;
    clearTimeout(this.retryTimer);
    this.close();
    try {
      const session = await this.enter();
      if (session.setup) {
        this.store.update({ link: { kind: "setup" } });
        return;
      }
      await this.readEverything();
      this.failures = 0; // events start from here on; what happened in between is read again when they are open
      this.store.update({ link: { kind: "live" }, stopRequested: false });
      this.listen();
    } catch (error) {
      this.onFailure(error);
    } finally {
      this.busy = false;
    }
  }

  /** With the key in the address, which works once, or with the cookie. */
  private async enter(): Promise<SessionBody> {
    const key = location.hash.startsWith(KEY_HASH) ? location.hash.slice(KEY_HASH.length) : null;
    if (key !== null) {
      history.replaceState(null, "", location.pathname);
      try {
        return await this.client.openSession(key);
      } catch (error) {
        if (!(error instanceof NodeError) || error.status !== 401) throw error;
      }
    }
    return await this.client.openSession();
  }

  private async readEverything(): Promise<void> {
    this.onStatus(await this.client.get<NodeStatus>("/api/status"));
    const [logs] = await Promise.all([this.client.get<LogLines>("/api/logs?after=0"), this.readSummaries()]);
    this.store.update({ logs: logs.records.slice(-MAX_LOGS) });
  }

  /** Read the data that is not part of the status. An answer that has not changed is the same object again, and draws nothing. */
  private async readSummaries(): Promise<void> {
    const [history, { peers }] = await Promise.all([
      this.client.get<LossHistory>("/api/training/history"),
      this.client.get<PeersSummary>("/api/peers"),
    ]);
    const isNew = history !== this.history;
    this.history = history;
    this.store.update((current) => ({ peers, curve: isNew ? curveOf(history) : current.curve }));
  }

  private async reread(): Promise<void> {
    try {
      await this.readEverything();
    } catch (error) {
      this.onFailure(error);
    }
  }

  private listen(): void {
    const logs = this.store.current.logs;
    const source = new EventSource(`/api/events?after=${logs[logs.length - 1]?.sequence ?? 0}`);
    this.source = source;
    this.lastMessage = Date.now();
    const on = <T>(name: string, handle: (value: T) => void) =>
      source.addEventListener(name, (event) => {
        this.lastMessage = Date.now();
        handle(JSON.parse((event as MessageEvent<string>).data) as T);
      });
    on<NodeStatus>("status", (status) => this.onStatus(status));
    on<LogLine>("log", (value) => this.onLogs([value]));
    source.onopen = () => void this.reread();
    source.onerror = () => {
      if (this.source !== source) return;
      this.close();
      void this.checkHealth();
    };
  }

  private onStatus(status: NodeStatus): void {
    const now = Date.now() / 1000;
    this.lastMessage = Date.now();
    this.store.update((current) => ({
      status,
      receivedAt: now,
      clockOffset: clockOffset(current.status, current.clockOffset, status, now),
    }));
  }

  private onLogs(records: LogLine[]): void {
    this.store.update((current) => {
      const last = current.logs[current.logs.length - 1]?.sequence ?? 0;
      const fresh = records.filter((record) => record.sequence > last);
      return fresh.length === 0 ? {} : { logs: [...current.logs, ...fresh].slice(-MAX_LOGS) };
    });
  }

  private async refresh(): Promise<void> {
    if (this.source === null || this.store.current.link.kind !== "live" || document.hidden) return;
    try {
      await this.readSummaries();
    } catch (error) {
      if (!(error instanceof NodeError)) return;
      if (error.status === 0) await this.checkHealth();
      if (error.status === 401) this.onFailure(error); // the session has ended
    }
  }

  private async watch(): Promise<void> {
    if (this.source !== null && Date.now() - this.lastMessage > SILENCE_MS) await this.checkHealth();
  }

  private async checkHealth(): Promise<void> {
    if (await this.client.isAlive()) {
      this.lastMessage = Date.now();
      if (this.source === null) this.retryIn(1);
    } else {
      this.onFailure(new NodeError("The node does not answer.", 0));
    }
  }

  private onFailure(error: unknown): void {
    this.close();
    if (error instanceof NodeError && error.status === 401) {
      this.store.update({ link: { kind: "locked" } });
      return;
    }
    this.failures += 1;
    const wait = Math.min(2 ** (this.failures - 1), LONGEST_WAIT_SECONDS);
    const now = Date.now() / 1000;
    this.store.update((current) => ({
      link: { kind: "gone", since: current.link.kind === "gone" ? current.link.since : now, nextTry: now + wait },
    }));
    this.retryIn(wait);
  }

  private retryIn(seconds: number): void {
    clearTimeout(this.retryTimer);
    this.retryTimer = setTimeout(() => void this.connect(), seconds * 1000);
  }

  private onVisibility(): void {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) this.hiddenTimer = setTimeout(() => this.close(), HIDDEN_MS);
    else if (this.store.current.link.kind === "locked") void this.connect(); // another tab may have opened a session
    else if (this.source === null && this.store.current.link.kind === "live") void this.connect();
  }

  private close(): void {
    this.source?.close();
    this.source = null;
  }
}

function curveOf(history: LossHistory): Curve {
  return { train: history.points.filter((point): point is LossPoint & { loss: number } => point.loss !== null), heldOut: history.held_out };
}

/** A snapshot never travels this long. A longer delay means that one of the computers has set its clock back. */
const MOST_DELAY_SECONDS = 60;

/** Node clock minus browser clock; the freshest snapshot of those seen is the least delayed. */
function clockOffset(before: NodeStatus | null, known: number, status: NodeStatus, now: number): number {
  const seen = status.time - now;
  const isAnother = before === null || before.started_at !== status.started_at;
  return isAnother || known - seen > MOST_DELAY_SECONDS ? seen : Math.max(known, seen);
}
