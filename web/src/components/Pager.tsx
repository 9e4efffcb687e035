// Steps through a long list; the number of the page is kept by the caller.

import { useState } from "preact/hooks";
import { count } from "../format";
import { actionOf } from "./parts";

interface Props {
  page: number;
  pages: number;
  name: string;
  onPage: (page: number) => void;
}

/** The items of the page that is shown, and what a Pager needs; a list that gets shorter shows its last page. */
export function usePages<T>(items: readonly T[], size: number): [readonly T[], Omit<Props, "name">] {
  const [wanted, onPage] = useState(0);
  const pages = Math.max(1, Math.ceil(items.length / size));
  const page = Math.min(wanted, pages - 1);
  return [items.slice(page * size, (page + 1) * size), { page, pages, onPage }];
}

export function Pager({ page, pages, name, onPage }: Props) {
  if (pages <= 1) return null;
  const step = (label: string, to: number, words: string) => (
    <button type="button" class="button" aria-label={words} {...actionOf(to === page || to < 0 || to >= pages, () => onPage(to))}>
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
