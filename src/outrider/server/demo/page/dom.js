// Creates elements of the page.

/** `children`: elements and texts. */
export function element(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}
