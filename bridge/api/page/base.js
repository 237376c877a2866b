// Where the page is: below http.base_path, which this file's own address tells.

export const BASE = new URL("..", import.meta.url).pathname.slice(0, -1);

// The address of a view or of the API, as a browser has to ask for it.
export const outer = (path) => (path.startsWith("/") ? BASE + path : path);

// The same without the base; an address that is not below it leads nowhere here.
export function inner(address) {
  const url = new URL(address);
  url.pathname = url.pathname.startsWith(`${BASE}/`) ? url.pathname.slice(BASE.length) : url.pathname === BASE ? "/" : "//";
  return url;
}
