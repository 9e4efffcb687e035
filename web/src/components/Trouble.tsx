// A defect of one view must not take the rest of the page with it.

import { Component } from "preact";
import type { ComponentChildren } from "preact";

interface Props {
  view: string;
  children: ComponentChildren;
}

export class Trouble extends Component<Props, { error: string | null }> {
  override state = { error: null };

  static override getDerivedStateFromError(error: unknown): { error: string } {
    return { error: error instanceof Error ? error.message : String(error) };
  }

  override componentDidUpdate(before: Props): void {
    if (before.view !== this.props.view && this.state.error !== null) this.setState({ error: null });
  }

  override render() {
    if (this.state.error === null) return this.props.children;
    return (
      <div class="view" role="alert">
        <h1 class="view-title">This view cannot be shown</h1>
        <p>
          That is a defect of the dashboard, not of your node, which continues: <code>{this.state.error}</code>
        </p>
        <p>
          Try another view, or{" "}
          <button type="button" class="button" onClick={() => this.setState({ error: null })}>
            show it again
          </button>
        </p>
      </div>
    );
  }
}
