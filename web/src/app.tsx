// The page: header, tabs, banners, the chosen view. Routing is the part of the address after #.

import type { NodeStatus } from "./api/status";
import { useEffect, useRef, useState } from "preact/hooks";
import type { NodeActions } from "./api/actions";
import { Banners } from "./components/Banners";
import { Controls } from "./components/Controls";
import { Locked } from "./components/Locked";
import { ThemeToggle } from "./components/ThemeToggle";
import { Trouble } from "./components/Trouble";
import { runningFor, walletName } from "./format";
import type { SetupCalls } from "./setup/setup";
import { Wizard } from "./setup/Wizard";
import type { Dashboard, Store } from "./state/store";
import { useDashboard, useNow } from "./state/store";
import { KEY_HASH } from "./state/connection";
import { Contribution } from "./views/Contribution";
import { Friends } from "./views/Friends";
import { Home } from "./views/Home";
import { Files, Model, Network } from "./views/Inside";
import { NotFound } from "./views/NotFound";
import { Settings } from "./views/Settings";
import { Talk } from "./views/Talk";
import { STATE_NAMES, stateTone } from "./words/verdict";

const TABS = ["Home", "Talk", "Model", "Network", "Files", "Settings"] as const;
type Tab = (typeof TABS)[number];
type View = Tab | "Contribution" | "Friends" | null; // null: the address names none

/** Subjects inside a view, by the name that an address gives them. */
const SUBJECTS: Record<string, View> = {
  overview: "Home",
  chat: "Talk",
  contribution: "Contribution",
  friends: "Friends",
  invite: "Friends",
  machines: "Network",
  training: "Model",
  pipeline: "Model",
  swarm: "Network",
  rounds: "Network",
  events: "Network",
  data: "Files",
  checkpoints: "Files",
  computer: "Files",
  log: "Files",
};

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
          {TABS.map((name) => (
            <a key={name} href={`#/${name.toLowerCase()}`} {...(name === tabOf(view) ? { "aria-current": "page" as const } : {})}>
              {name}
            </a>
          ))}
        </nav>
      </header>
      <main id="main" tabIndex={-1}>
        <Banners dashboard={dashboard} now={now} tellsStages={view !== "Model"} />
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
  const inside = { dashboard, status, nodeNow, reachable, actions, say };
  switch (view) {
    case "Home":
      return <Home {...{ dashboard, status, nodeNow }} />;
    case "Contribution":
      return <Contribution {...{ nodeNow, reachable, actions }} />;
    case "Talk":
      return <Talk {...{ status, nodeNow, reachable, actions }} />;
    case "Friends":
      return <Friends {...{ status, reachable, actions }} />;
    case "Model":
      return <Model {...inside} />;
    case "Network":
      return <Network {...inside} />;
    case "Files":
      return <Files {...inside} />;
    case "Settings":
      return <Settings {...{ status, reachable, actions }} onMessage={say} />;
    case null:
      return <NotFound wanted={wantedView()} views={TABS} />;
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
        wallet <span class="mono">{walletName(status.wallet_id)}</span>
      </span>
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

/** A tab, or the back button, may still lead to a step of the wizard that this node has ended. */
const WIZARD = "setup-";

function viewFromHash(): View {
  const wanted = wantedView().toLowerCase();
  if (wanted === "" || wanted.startsWith(WIZARD) || location.hash.startsWith(KEY_HASH)) return "Home";
  return TABS.find((name) => name.toLowerCase() === wanted) ?? (Object.hasOwn(SUBJECTS, wanted) ? SUBJECTS[wanted]! : null);
}

function tabOf(view: View): Tab | null {
  if (view === "Friends") return "Network";
  return view === "Contribution" ? "Home" : view;
}

function useView(): View {
  const [address, setAddress] = useState(location.hash);
  const first = useRef(true);
  const view = viewFromHash();
  useEffect(() => {
    const changed = () => setAddress(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => {
    document.title = view === "Home" ? "NeuroShard" : `${view ?? "No such page"} · NeuroShard`;
    const isSubject = view !== "Contribution" && view !== "Friends" && Object.hasOwn(SUBJECTS, wantedView().toLowerCase());
    if (!first.current && !isSubject) scrollTo({ top: 0 }); // a subject scrolls to itself
    first.current = false;
  }, [view, address]);
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
