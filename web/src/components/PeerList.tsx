// All nodes of the run, a page at a time, found and ordered as the reader likes.

import type { NodeStatus, PeerStatus } from "../api/status";
import { useMemo, useState } from "preact/hooks";
import { count, plural } from "../format";
import type { Order } from "../words/order";
import { found, inOrder, ORDERS, SORTED_COLUMN } from "../words/order";
import { Pager } from "./Pager";
import { OwnRow, PeerRow } from "./PeerRow";
import { Card } from "./parts";

const PAGE = 25;
const COLUMNS = ["Node", "Doing", "Tokens/s", "Loss", "Steps", "Connection", "Traffic", "Since", "Rating"];

interface Props {
  status: NodeStatus;
  peers: readonly PeerStatus[];
  nodeNow: number;
}

export function PeerList({ status, peers, nodeNow }: Props) {
  const [search, setSearch] = useState("");
  const [order, setOrder] = useState<Order>("active");
  const [wanted, setPage] = useState(0);
  const shown = useMemo(() => inOrder(found(peers, search), order), [peers, search, order]);
  const pages = Math.max(1, Math.ceil(shown.length / PAGE));
  const page = Math.min(wanted, pages - 1);
  const rows = shown.slice(page * PAGE, (page + 1) * PAGE);
  const from = (change: () => void) => {
    change();
    setPage(0);
  };
  return (
    <Card title="Who is there" hint="Every node reports this about itself every few seconds, signed with its own key." wide>
      <div class="peer-options">
        <label>
          <span>Find</span>
          <input type="search" value={search} onInput={(event) => from(() => setSearch(event.currentTarget.value))} />
        </label>
        <label>
          <span>Order</span>
          <select value={order} onChange={(event) => from(() => setOrder(event.currentTarget.value as Order))}>
            {Object.entries(ORDERS).map(([value, words]) => (
              <option key={value} value={value}>
                {words}
              </option>
            ))}
          </select>
        </label>
        <Pager page={page} pages={pages} name="Pages of the list, top" onPage={setPage} />
      </div>
      <p class="muted small" role="status">
        {rangeWords(page, rows.length, shown.length, peers.length)}
      </p>
      <div class="scroll" role="region" aria-label="Nodes of this run" tabIndex={0}>
        <table class="peers">
          <thead>
            <tr>
              {COLUMNS.map((name) => (
                <th key={name} scope="col" {...(SORTED_COLUMN[order][0] === name ? { "aria-sort": SORTED_COLUMN[order][1] } : {})}>
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            <OwnRow status={status} nodeNow={nodeNow} />
            {rows.map((peer) => (
              <PeerRow key={peer.node_id} peer={peer} nodeNow={nodeNow} />
            ))}
          </tbody>
        </table>
      </div>
      <Pager page={page} pages={pages} name="Pages of the list, bottom" onPage={setPage} />
      <p class="muted small">
        Direct: a connection of its own. Punched: also direct, through a hole in a router. Relayed: another node passes everything on.
        Through others: no connection, its reports arrive by way of others.
      </p>
    </Card>
  );
}

function rangeWords(page: number, onPage: number, shown: number, all: number): string {
  const of = shown === all ? plural(all, "other node") : `${count(shown)} found among ${plural(all, "other node")}`;
  if (shown <= PAGE) return shown === 0 && all > 0 ? `None found among ${plural(all, "other node")}.` : `${of}.`;
  return `${count(page * PAGE + 1)} to ${count(page * PAGE + onPage)} of ${of}.`;
}
