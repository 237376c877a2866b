// The path of the page: http.base_path, from this file's own address.

export const BASE = new URL("..", import.meta.url).pathname.slice(0, -1);

// The address of a view or of the API for the browser.
export const outer = (path) => (path.startsWith("/") ? BASE + path : path);

// The same without the base; an address outside of it has no view.
export function inner(address) {
  const url = new URL(address);
  url.pathname = url.pathname.startsWith(`${BASE}/`) ? url.pathname.slice(BASE.length) : url.pathname === BASE ? "/" : "//";
  return url;
}
