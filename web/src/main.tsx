// Composition: one client, one store, one connection, one page.

import { render } from "preact";
import { nodeActions } from "./api/actions";
import { Client } from "./api/client";
import { App } from "./app";
import { setupCalls } from "./setup/setup";
import { Connection } from "./state/connection";
import { Store } from "./state/store";

const root = document.getElementById("app");
if (root) {
  const client = new Client();
  const store = new Store();
  const connection = new Connection(client, store);
  const actions = nodeActions(client, (stopRequested) => store.update({ stopRequested }));
  const setup = setupCalls(client, () => void connection.connect());
  root.replaceChildren();
  render(<App store={store} actions={actions} setup={setup} enter={(key) => connection.enterWith(key)} />, root);
  connection.start();
}
