// The page: header, tabs, banners, the chosen view. Routing is the part of the address after #.

import type { NodeStatus } from "./api/status";
import { useEffect, useRef, useState } from "preact/hooks";
import type { NodeActions } from "./api/actions";
import { Banners } from "./components/Banners";
import { Controls } from "./components/Controls";
import { Locked } from "./components/Locked";
import { ThemeToggle } from "./components/ThemeToggle";
import { Trouble } from "./components/Trouble";
import { runningFor, shortId } from "./format";
import type { SetupCalls } from "./setup/setup";
import { Wizard } from "./setup/Wizard";
import type { Dashboard, Store } from "./state/store";
import { useDashboard, useNow } from "./state/store";
import { KEY_HASH } from "./state/connection";
import { Checkpoints } from "./views/Checkpoints";
import { Contribution } from "./views/Contribution";
import { Data } from "./views/Data";
import { Friends } from "./views/Friends";
import { Log } from "./views/Log";
import { NotFound } from "./views/NotFound";
import { Overview } from "./views/Overview";
import { Pipeline } from "./views/Pipeline";
import { Rounds } from "./views/Rounds";
import { Settings } from "./views/Settings";
import { Swarm } from "./views/Swarm";
import { Talk } from "./views/Talk";
import { Training } from "./views/Training";
import { STATE_NAMES, stateTone } from "./words/verdict";

const VIEWS = [
  "Overview",
  "Contribution",
  "Chat",
  "Training",
  "Friends",
  "Swarm",
  "Pipeline",
  "Rounds",
  "Data",
  "Checkpoints",
  "Log",
  "Settings",
] as const;
type View = (typeof VIEWS)[number] | null; // null: the address names none

interface Message {
  text: string;
  failed: boolean;
}

interface Props {
  store: Store;
  actions: NodeActions;
  setup: SetupCalls;
  enter: (key: string) => Promise<void>;
}

export function App({ store, actions, setup, enter }: Props) {
  const dashboard = useDashboard(store);
  const now = useNow();
  const view = useView();
  const tabs = useShownTab(view);
  const [message, setMessage] = useMessage();
  useOpenedLink(actions, dashboard.link.kind === "live");
  if (dashboard.link.kind === "locked") return <Locked enter={enter} />;
  if (dashboard.link.kind === "setup") return <Wizard calls={setup} />;
  const { status } = dashboard;
  const reachable = dashboard.link.kind === "live";
  const nodeNow = reachable ? now + dashboard.clockOffset : dashboard.receivedAt + dashboard.clockOffset;
  const say = (text: string, failed: boolean) => setMessage({ text, failed });
  return (
    <>
      <a class="skip-link" href="#main" onClick={skipToMain}>
        Skip to the content
      </a>
      <header class="top">
        <div class="top-row">
          <Brand dashboard={dashboard} />
          <div class="top-actions">
            {status && <Controls status={status} reachable={reachable} actions={actions} onMessage={say} />}
            <ThemeToggle />
          </div>
        </div>
        <nav class="tabs" aria-label="Views" ref={tabs}>
          {VIEWS.map((name) => (
            <a key={name} href={`#/${name.toLowerCase()}`} {...(name === view ? { "aria-current": "page" as const } : {})}>
              {name}
            </a>
          ))}
        </nav>
      </header>
      <main id="main" tabIndex={-1}>
        <Banners dashboard={dashboard} now={now} tellsStages={view !== "Pipeline"} />
        <p class={`message ${message?.failed ? "text-bad" : ""}`} role="status">
          {message?.text}
        </p>
        <div class={dashboard.link.kind === "gone" ? "stale" : "live"}>
          <Trouble view={view ?? ""}>
            {status ? <ViewOf {...{ view, dashboard, status, nodeNow, reachable, actions, say }} /> : <Waiting dashboard={dashboard} />}
          </Trouble>
        </div>
      </main>
      {status && <Footer status={status} nodeNow={nodeNow} />}
    </>
  );
}

interface ViewProps {
  view: View;
  dashboard: Dashboard;
  status: NodeStatus;
  nodeNow: number;
  reachable: boolean;
  actions: NodeActions;
  say: (text: string, failed: boolean) => void;
}

function ViewOf({ view, dashboard, status, nodeNow, reachable, actions, say }: ViewProps) {
  switch (view) {
    case "Overview":
      return <Overview {...{ dashboard, status, nodeNow }} />;
    case "Contribution":
      return <Contribution {...{ nodeNow, reachable, actions }} />;
    case "Chat":
      return <Talk {...{ status, nodeNow, reachable, actions }} />;
    case "Training":
      return <Training {...{ dashboard, status, nodeNow }} />;
    case "Friends":
      return <Friends {...{ reachable, actions }} startedAt={status.started_at} />;
    case "Swarm":
      return <Swarm {...{ dashboard, status, nodeNow }} />;
    case "Pipeline":
      return <Pipeline {...{ status, nodeNow, reachable, actions }} />;
    case "Rounds":
      return <Rounds {...{ status, nodeNow, reachable, actions }} />;
    case "Data":
      return <Data {...{ status, nodeNow }} />;
    case "Checkpoints":
      return <Checkpoints {...{ status, nodeNow, reachable, actions }} onMessage={say} />;
    case "Log":
      return <Log {...{ logs: dashboard.logs, reachable, actions }} onMessage={say} />;
    case "Settings":
      return <Settings {...{ status, nodeNow, reachable, actions }} onMessage={say} />;
    case null:
      return <NotFound wanted={wantedView()} views={VIEWS} />;
  }
}

function Brand({ dashboard }: { dashboard: Dashboard }) {
  const { status, link } = dashboard;
  const gone = link.kind === "gone";
  const tone = gone ? "bad" : status ? stateTone(status.state) : "busy";
  const words = gone ? "No answer" : status ? STATE_NAMES[status.state] : "Connecting";
  return (
    <div class="brand">
      <img src="./favicon.svg" alt="" width="28" height="28" />
      <span class="brand-name">NeuroShard</span>
      <span class={`pill tone-${tone}`} role="status">
        <i class="dot" aria-hidden="true" />
        {words}
      </span>
      {status?.is_demo && (
        <span class="pill tone-demo" title="It trains on text found on this computer, to show how it works.">
          Demo data
        </span>
      )}
    </div>
  );
}

function Waiting({ dashboard }: { dashboard: Dashboard }) {
  const gone = dashboard.link.kind === "gone";
  return <div class="boot">{gone ? <p>Nothing to show yet.</p> : <p>Asking the node how it is…</p>}</div>;
}

function Footer({ status, nodeNow }: { status: NodeStatus; nodeNow: number }) {
  return (
    <footer class="foot small muted">
      <span>NeuroShard {status.version}</span>
      <span>running for {runningFor(status, nodeNow)}</span>
      <span>
        wallet <span class="mono">{shortId(status.wallet_id)}</span>
      </span>
      {status.is_demo && <span>demo data: throw-away wallet, text from this computer</span>}
    </footer>
  );
}

function skipToMain(event: Event): void {
  event.preventDefault(); // the fragment belongs to the views
  document.getElementById("main")?.focus();
}

/** "#/data" and "#data" are the same: with a slash it is read aloud as a page, without as a place in this one. */
function wantedView(): string {
  return location.hash.replace(/^#\/?/, "");
}

function viewFromHash(): View {
  const wanted = wantedView().toLowerCase();
  return wanted === "" || location.hash.startsWith(KEY_HASH) ? "Overview" : (VIEWS.find((name) => name.toLowerCase() === wanted) ?? null);
}

function useView(): View {
  const [view, setView] = useState(viewFromHash);
  const first = useRef(true);
  useEffect(() => {
    const changed = () => setView(viewFromHash());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => {
    document.title = view === "Overview" ? "NeuroShard" : `${view ?? "No such page"} · NeuroShard`;
    if (!first.current) scrollTo({ top: 0 });
    first.current = false;
  }, [view]);
  return view;
}

/** Keeps the tab of the shown view in sight where not all of them fit. */
function useShownTab(view: View) {
  const tabs = useRef<HTMLElement>(null);
  useEffect(() => {
    const row = tabs.current;
    const tab = row?.querySelector<HTMLElement>("[aria-current]");
    if (row && tab) row.scrollLeft = tab.offsetLeft - row.offsetLeft - (row.clientWidth - tab.clientWidth) / 2;
  }, [view]);
  return tabs;
}

/** An invitation that was opened on this computer is shown at once. Only its reader can join. */
function useOpenedLink(actions: NodeActions, isLive: boolean): void {
  useEffect(() => {
    if (!isLive) return;
    actions.readMembers().then(
      ({ shown }) => {
        if (shown.invitation !== null || shown.fault !== null) location.hash = "#/friends";
      },
      () => undefined, // the view itself shows what is wrong
    );
  }, [actions, isLive]);
}

/** A sentence about the last command; it leaves by itself. */
function useMessage(): [Message | null, (message: Message) => void] {
  const [message, setMessage] = useState<Message | null>(null);
  useEffect(() => {
    if (message === null) return;
    const timer = setTimeout(() => setMessage(null), 10_000);
    return () => clearTimeout(timer);
  }, [message]);
  return [message, setMessage];
}
