"""How the pages of load tests, plans and tuning look."""

__all__ = ["STYLE"]

STYLE = """
:root { color-scheme: light dark; --soft: #6b7280; --line: #d8dbe0; --card: #f6f7f9; --good: #218a4e; --bad: #c0392b; }
@media (prefers-color-scheme: dark) {
  :root { --soft: #9aa3af; --line: #3a3f47; --card: #1f2328; --good: #56c48a; --bad: #ff7b6b; }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.soft { color: var(--soft); } .scroll { overflow-x: auto; }
.verdict { background: var(--card); border-radius: .6rem; padding: .7rem 1.1rem; margin: 1.2rem 0; font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.tiles div { background: var(--card); border-radius: .6rem; padding: .5rem .9rem; }
.tiles b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.8rem 0; } figcaption { font-weight: 600; margin-bottom: .4rem; } svg { width: 100%; height: auto; }
"""
