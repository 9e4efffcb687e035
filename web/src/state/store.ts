// The one place that holds what the dashboard knows; components subscribe, the connection writes.

import type { LogLine } from "../api/responses";
import type { NodeStatus, PeerStatus } from "../api/status";
import { useEffect, useState } from "preact/hooks";
import type { Curve } from "../curve/series";
import { emptyCurve } from "../curve/series";

export type Link =
  | { kind: "connecting" }
  | { kind: "live" }
  | { kind: "setup" } // it has no token yet
  | { kind: "locked" } // this browser has no session
  | { kind: "gone"; since: number; nextTry: number };

export interface Dashboard {
  link: Link;
  status: NodeStatus | null;
  receivedAt: number; // browser clock, seconds, of the last message of any kind
  clockOffset: number; // node clock minus browser clock, seconds
  peers: readonly PeerStatus[]; // all of them; a new array whenever one changed
  curve: Curve;
  logs: LogLine[];
  stopRequested: boolean;
}

export type Update = Partial<Dashboard> | ((current: Dashboard) => Partial<Dashboard>);

export class Store {
  private value: Dashboard = {
    link: { kind: "connecting" },
    status: null,
    receivedAt: 0,
    clockOffset: 0,
    peers: [],
    curve: emptyCurve(),
    logs: [],
    stopRequested: false,
  };
  private readonly listeners = new Set<() => void>();

  get current(): Dashboard {
    return this.value;
  }

  update(update: Update): void {
    const change = typeof update === "function" ? update(this.value) : update;
    this.value = { ...this.value, ...change };
    for (const listener of this.listeners) listener();
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

export function useDashboard(store: Store): Dashboard {
  const [value, setValue] = useState(store.current);
  useEffect(() => {
    setValue(store.current);
    return store.subscribe(() => setValue(store.current));
  }, [store]);
  return value;
}

/** Browser time in seconds, renewed every second: for ages and countdowns. */
export function useNow(): number {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}
