// Chooses a folder of this computer: the node lists folders, and how much text is in each.

import type { FolderListBody } from "../api/bodies";
import { useEffect, useRef, useState } from "preact/hooks";
import { FOLDERS } from "../arrival/words";
import { Fault, faultsOf } from "./fields";
import type { SetupCalls } from "./setup";

/** Opening a folder also chooses it. `start` is the folder to begin with; empty: the home folder, which is not chosen. */
export function FolderPicker({ calls, start, onChoose }: { calls: SetupCalls; start: string; onChoose: (path: string) => void }) {
  const [shown, setShown] = useState<FolderListBody | null>(null);
  const [fault, setFault] = useState("");
  const [isBusy, setIsBusy] = useState(false);
  const list = useRef<HTMLUListElement>(null);
  const wanted = useRef(0); // number of the last request: an answer to an earlier one is late
  const show = async (path: string | null): Promise<FolderListBody | null> => {
    const number = ++wanted.current;
    setIsBusy(true);
    try {
      const found = await calls.listFolder(path);
      if (number !== wanted.current) return null;
      setShown(found);
      setFault("");
      return found;
    } catch (error) {
      const { fields, other } = faultsOf(error);
      if (number === wanted.current) setFault(fields.path ?? other);
      return null;
    } finally {
      if (number === wanted.current) setIsBusy(false);
    }
  };
  useEffect(() => {
    void show(start || null).then(async (found) => {
      if (found === null && start) await show(null); // that folder is gone
    });
    return () => void wanted.current++;
  }, []);
  const open = async (path: string) => {
    const found = await show(path);
    if (found === null) return;
    onChoose(found.folder.path);
    list.current?.querySelector("button")?.focus();
  };
  if (shown === null) return <>{fault ? <Fault id="folders-fault" text={fault} /> : <p class="muted small">{FOLDERS.reading}</p>}</>;
  return (
    <section class="folders" aria-label={FOLDERS.title} aria-busy={isBusy}>
      <p role="status">
        <span class="mono">{shown.folder.path}</span> <span class="muted small">{FOLDERS.count(shown.folder)}</span>
      </p>
      {shown.drives.length > 1 && (
        <div class="drives" role="group" aria-label={FOLDERS.drives}>
          {shown.drives.map((drive) => (
            <button key={drive} type="button" class="button" aria-pressed={isOn(drive, shown.folder.path)} onClick={() => void show(drive)}>
              {drive.replace(/\\$/, "")}
            </button>
          ))}
        </div>
      )}
      <Fault id="folders-fault" text={fault} />
      <ul ref={list} onKeyDown={(event) => moveFocus(event, shown.parent === null ? null : () => void open(shown.parent!))}>
        {shown.parent !== null && <Row name={FOLDERS.up} note="" onOpen={() => void open(shown.parent!)} />}
        {shown.folders.map((folder) => (
          <Row key={folder.path} name={nameIn(shown.folder.path, folder.path)} note={FOLDERS.count(folder)} onOpen={() => void open(folder.path)} />
        ))}
      </ul>
      {shown.folders.length === 0 && <p class="muted small">{FOLDERS.none}</p>}
      {shown.has_more && <p class="muted small">{FOLDERS.more}</p>}
    </section>
  );
}

/** Whether a path is on this drive, such as C:\ */
function isOn(drive: string, path: string): boolean {
  return path.toUpperCase().startsWith(drive.toUpperCase());
}

/** The last part of a path below a folder. The folder of everything, "/", ends with the separator already. */
function nameIn(above: string, path: string): string {
  return path.slice(above.length).replace(/^[/\\]/, "");
}

function Row({ name, note, onOpen }: { name: string; note: string; onOpen: () => void }) {
  return (
    <li>
      <button type="button" onClick={onOpen}>
        <span>{name}</span>
        <span class="muted small">{note}</span>
      </button>
    </li>
  );
}

/** Up and down move through the rows, Home and End to the first and the last; left opens the folder above. */
function moveFocus(event: KeyboardEvent, goUp: (() => void) | null): void {
  const rows = [...(event.currentTarget as HTMLElement).querySelectorAll("button")];
  const place = rows.indexOf(document.activeElement as HTMLButtonElement);
  const places: Record<string, number> = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: rows.length - 1 };
  const next = places[event.key];
  if (next !== undefined) rows[Math.min(Math.max(next, 0), rows.length - 1)]?.focus();
  else if (event.key === "ArrowLeft" && goUp) goUp();
  else return;
  event.preventDefault();
}
