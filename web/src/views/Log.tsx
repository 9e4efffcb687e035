// The node's log, newest at the bottom, filtered by level and text.

import type { LogLine } from "../api/responses";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { NodeActions } from "../api/actions";
import { actionOf, Card, Section } from "../components/parts";
import { clock, count, plural } from "../format";

const LEVELS = ["debug", "info", "warning", "error", "critical"];
const SHOWN = 400;

interface Props {
  logs: LogLine[];
  reachable: boolean;
  actions: NodeActions;
  onMessage: (text: string, failed: boolean) => void;
}

export function Log({ logs, reachable, actions, onMessage }: Props) {
  const [level, setLevel] = useState("info");
  const [search, setSearch] = useState("");
  const [follow, setFollow] = useState(true);
  const box = useRef<HTMLDivElement>(null);
  const shown = useMemo(() => filtered(logs, level, search), [logs, level, search]);
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown, follow]);
  return (
    <Section title="Log">
      <Card title="What the node said" wide>
        <div class="log-options">
          <label>
            <span>Least level</span>
            <select value={level} onChange={(event) => setLevel(event.currentTarget.value)}>
              {LEVELS.map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
          </label>
          <label>
            <span>Contains</span>
            <input type="search" value={search} onInput={(event) => setSearch(event.currentTarget.value)} />
          </label>
          <label class="check">
            <input type="checkbox" checked={follow} onChange={(event) => setFollow(event.currentTarget.checked)} />
            <span>Follow new lines</span>
          </label>
        </div>
        <div class="log" ref={box} tabIndex={0} role="log" aria-live="off" aria-label="Log lines">
          {shown.map((record) => (
            <div key={record.sequence} class={`log-line log-${record.level.toLowerCase()}`}>
              <time>{clock(record.time)}</time>
              <span class="log-level">{record.level.toLowerCase()}</span>
              <span class="log-message">{record.message}</span>
            </div>
          ))}
          {shown.length === 0 && <p class="muted">No lines.</p>}
        </div>
        <p class="muted small">
          {`${count(shown.length)} of ${plural(logs.length, "line")}. The complete log is in the data folder.`}
        </p>
      </Card>
      <Report {...{ reachable, actions, onMessage }} />
    </Section>
  );
}

function Report({ reachable, actions, onMessage }: Omit<Props, "logs">) {
  const [busy, setBusy] = useState(false);
  const download = async () => {
    setBusy(true);
    try {
      const { name, content } = await actions.downloadReport();
      saveFile(name, content);
      onMessage(`${name} is with your downloads.`, false);
    } catch (error) {
      onMessage(error instanceof Error ? error.message : String(error), true);
    } finally {
      setBusy(false);
    }
  };
  return (
    <Card title="Report a problem" hint="A file for those who help you: versions, settings, what the node says of itself, and the newest log lines.">
      <p class="small">
        Taken out of it: token, wallet phrase, API secret, passwords, your home folder, your user and host name, and public addresses.
        It is a zip file with plain texts: read it before you give it away.
      </p>
      <p>
        <button type="button" class="button" {...actionOf(busy || !reachable, () => void download())}>
          {busy ? "Collecting…" : "Download the report"}
        </button>
      </p>
    </Card>
  );
}

function saveFile(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // once the browser has taken it
}

function filtered(logs: LogLine[], level: string, search: string): LogLine[] {
  const least = LEVELS.indexOf(level);
  const wanted = search.trim().toLowerCase();
  return logs
    .filter((record) => LEVELS.indexOf(record.level.toLowerCase()) >= least)
    .filter((record) => wanted === "" || record.message.toLowerCase().includes(wanted))
    .slice(-SHOWN);
}
