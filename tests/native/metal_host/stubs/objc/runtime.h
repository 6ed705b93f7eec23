// Copyright © 2026 the mlx_paged authors. Apache-2.0.
// The parts of Apple's SDK that metal-cpp names, and no more.
#pragma once

#include <cstddef>

struct objc_object {
  void* isa;
};
using id = objc_object*;
using Class = struct objc_class*;
using SEL = struct objc_selector*;
using Method = struct objc_method*;
using Protocol = struct objc_protocol;
using IMP = id (*)(id, SEL, ...);
using BOOL = bool;

extern "C" {
SEL sel_registerName(const char* name);
id objc_lookUpClass(const char* name);
id objc_getClass(const char* name);
Protocol* objc_getProtocol(const char* name);
Class object_getClass(id object);
Method class_getInstanceMethod(Class cls, SEL selector);
IMP method_getImplementation(Method method);
BOOL class_addMethod(Class cls, SEL selector, IMP implementation, const char* types);
Class objc_allocateClassPair(Class superclass, const char* name, size_t extra);
void objc_registerClassPair(Class cls);
}
