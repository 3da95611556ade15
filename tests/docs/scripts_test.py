#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts_test.py SOURCE CMAKE: the scripts that read sources: Doxygen's filter, the checks of
comments and licences, and the commit of a build."""
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

SOURCE, CMAKE = pathlib.Path(sys.argv[1]), sys.argv[2]
HEADER = """\
// The head,
// of two lines.
#pragma once
#include <vector>  // not documented

// A heading.

// A type.
struct Known {
  int x = 0;  // [T]
  // NOLINTNEXTLINE
  int y;  /* of C */
};
class Later;  // not documented
}  // namespace
"""
SHOWN = """\
/// The head,
/// of two lines.
/// @file
#include <vector>  // not documented

// A heading.

/// A type.
struct Known {
  int x = 0; ///< [T]

  int y; /**< of C */
};
class Later;  // not documented
}  // namespace
"""


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def git(folder, *arguments):
    done = run("git", "-C", folder, "-c", "user.name=x", "-c", "user.email=x@x", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class InAFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def put(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path


class Filter(InAFolder):
    def shown(self, name, text):
        script = SOURCE / "scripts/doxygen_filter.py"
        return run(sys.executable, "-B", script, self.put(name, text)).stdout

    def test_plain_comments_become_documentation(self):
        self.assertEqual(self.shown("a.h", HEADER), SHOWN)

    def test_the_licence_is_not_documentation(self):
        self.assertEqual(self.shown("a.h", "// SPDX-License-Identifier: X\n" + HEADER), "\n" + SHOWN)

    def test_comments_of_c(self):
        self.assertEqual(self.shown("a.h", "/* The\n * head. */\n#ifndef A\n/* f. */\nint f(void);\n"),
                         "/** The\n * head. @file */\n#ifndef A\n/** f. */\nint f(void);\n")

    def test_links_within_the_repository_are_text(self):
        self.assertEqual(self.shown("a.md", "[a](b.md) and [c](https://d)\n"),
                         "a and [c](https://d)\n")


class Words(InAFolder):
    def check(self, declarations):
        """Runs the check on what Doxygen writes about a header of a struct."""
        header = "\n".join(line for line, _ in declarations)
        self.put("a.h", header + "\n")
        members = "".join(
            f"""<memberdef kind="{kind}" prot="public"><name>{name}</name>
            {'<param/>' if kind == 'function' else ''}
            <briefdescription>{words}</briefdescription><detaileddescription/>
            <location file="a.h" line="{i + 1}"/></memberdef>"""
            for i, (_, member) in enumerate(declarations) if member
            for kind, name, words in [member])
        self.put("xml/a.xml", textwrap.dedent(f"""<doxygen><compounddef kind="struct" prot="public">
            <compoundname>a::S</compoundname><briefdescription>S.</briefdescription>
            <detaileddescription/><location file="a.h" line="1"/>
            <sectiondef>{members}</sectiondef></compounddef></doxygen>"""))
        return run(sys.executable, "-B", SOURCE / "scripts/check_api_docs.py", "xml",
                   cwd=self.folder)

    def test_a_function_without_words_is_named(self):
        done = self.check([("int f(int);", ("function", "f", ""))])
        self.assertEqual((done.returncode, done.stdout), (1, "a.h:1: function f has no comment\n"))

    def test_words_names_and_groups_will_do(self):
        done = self.check([("// f.", None), ("int f(int);", ("function", "f", "f.")),
                           ("int g(int);", ("function", "g", "")), ("", None),
                           ("int x;", ("variable", "x", "")), ("S(int);", ("function", "S", ""))])
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_a_group_ends_at_a_blank_line(self):
        done = self.check([("// f.", None), ("int f(int);", ("function", "f", "f.")), ("", None),
                           ("int g(int);", ("function", "g", ""))])
        self.assertEqual(done.stdout, "a.h:4: function g has no comment\n")

    def test_no_output_is_an_error(self):
        done = run(sys.executable, "-B", SOURCE / "scripts/check_api_docs.py", self.folder)
        self.assertEqual(done.returncode, 1)


class Licence(InAFolder):
    def check(self, *arguments):
        return run(sys.executable, "-B", SOURCE / "scripts/check_licence.py", *arguments,
                   self.folder)

    def test_missing_lines_are_named_and_inserted(self):
        git(self.folder, "init", "-q")
        self.put("LICENSE", "Apache License\n")
        files = {"a.cpp": "int x;\n", "b.py": "#!/usr/bin/env python3\nx = 1\n",
                 "include/switchyard/c/c.h": "/* C. */\n", "CMakeLists.txt": "", "d.md": "text\n",
                 "tests/data/e.py": "data\n"}
        for name, text in files.items():
            self.put(name, text)
        git(self.folder, "add", ".")
        self.put("not_in_git.py", "x = 1\n")
        done = self.check()
        self.assertEqual(done.returncode, 1)
        self.assertIn("4 of 4 files lack it; insert it with --fix", done.stdout)
        self.assertIn("a.cpp: the first line must be: // SPDX-License-Identifier: Apache-2.0\n",
                      done.stdout)
        self.assertEqual(self.check("--fix").stdout, "4 files name Apache-2.0; 4 were changed\n")
        line = "SPDX-License-Identifier: Apache-2.0"
        files.update({"a.cpp": f"// {line}\nint x;\n",
                      "b.py": f"#!/usr/bin/env python3\n# {line}\nx = 1\n",
                      "include/switchyard/c/c.h": f"/* {line} */\n/* C. */\n",
                      "CMakeLists.txt": f"# {line}\n"})
        for name, text in files.items():
            self.assertEqual((self.folder / name).read_text(encoding="utf-8"), text)
        self.assertEqual(self.check().stdout, "4 files name Apache-2.0\n")

    def test_another_licence_is_an_error(self):
        self.put("LICENSE", "Another\n")
        self.assertIn("is not the Apache-2.0 licence", self.check().stderr)


class Commit(InAFolder):
    def commit_of(self, folder):
        output = self.folder / "commit.cpp"
        done = run(CMAKE, f"-DSOURCE={folder}", f"-DOUTPUT={output}", "-P",
                   SOURCE / "cmake/WriteCommit.cmake")
        self.assertEqual(done.returncode, 0, done.stderr)
        return output.read_text(encoding="utf-8").split('kCommit = "')[1].split('"')[0]

    def test_names_the_commit_and_whether_there_are_changes(self):
        repository = self.put("repository/inner/file", "1").parents[1]
        self.assertEqual(self.commit_of(repository), "")
        git(repository, "init", "-q")
        self.assertEqual(self.commit_of(repository), "")
        git(repository, "add", ".")
        git(repository, "commit", "-qm", "One")
        git(repository, "tag", "v1")
        commit = git(repository, "rev-parse", "HEAD")[:12]
        self.assertEqual(self.commit_of(repository), commit)
        written = (self.folder / "commit.cpp").stat().st_mtime_ns
        self.assertEqual(self.commit_of(repository), commit)
        self.assertEqual((self.folder / "commit.cpp").stat().st_mtime_ns, written)
        self.assertEqual(self.commit_of(repository / "inner"), "")
        (repository / "inner/file").write_text("2", encoding="utf-8")
        self.assertEqual(self.commit_of(repository), commit + "-dirty")


unittest.main(argv=sys.argv[:1])
