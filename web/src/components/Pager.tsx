// Steps through a long list; the number of the page is kept by the caller.

import { count } from "../format";

interface Props {
  page: number;
  pages: number;
  name: string;
  onPage: (page: number) => void;
}

export function Pager({ page, pages, name, onPage }: Props) {
  if (pages <= 1) return null;
  const step = (label: string, to: number, words: string) => (
    <button type="button" class="button" disabled={to === page || to < 0 || to >= pages} aria-label={words} onClick={() => onPage(to)}>
      {label}
    </button>
  );
  return (
    <nav class="pager" aria-label={name}>
      {step("«", 0, "First page")}
      {step("‹ Previous", page - 1, "Previous page")}
      <span class="small">
        Page {count(page + 1)} of {count(pages)}
      </span>
      {step("Next ›", page + 1, "Next page")}
      {step("»", pages - 1, "Last page")}
    </nav>
  );
}
