// Prepared calls without Python: the host side of a call whose preparation Python has done.
//
// `record.py` writes down once what the Python path does in a call: the memory that it allocates,
// the few tensor operations, and the launches with their parameters. That list is a `Plan`. This
// file finds the plan of a call by everything on which Python's checks and choices depend, and goes
// through it. It decides nothing: a call that it has not seen, or in which anything is unusual,
// returns to Python.
//
// The driver is given by the addresses of its functions, so that the file needs neither CUDA's
// headers nor its library, and tests pass a driver of their own.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace py = pybind11;
namespace ta = torch::autograd;
using at::Tensor;

namespace {

// ---- the driver ---------------------------------------------------------------------------------

// CUlaunchAttribute with CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the kernel may start
// before the one before it on the stream ends.
struct Overlap {
  int id = 6;
  alignas(8) int allowed = 1;  // a union of 64 bytes
  char rest[60] = {};
};
static_assert(sizeof(Overlap) == 72);

struct LaunchConfig {  // CUlaunchConfig
  unsigned sizes[7];  // grid, block, bytes of shared memory
  void* stream;
  const Overlap* attributes;
  unsigned attribute_count;
};

struct Driver {
  using Status = int;
  Status (*launch)(const LaunchConfig*, void*, void**, void**);
  Status (*current_context)(void**);
  Status (*push_context)(void*);
  Status (*pop_context)(void**);
  Status (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                   const uint32_t*, int, int, int, int);
  void* (*stream)(int);  // the current stream of a device; null: ask torch
};

// torch's current stream as a CUstream. Since torch 2.11 the interface of all devices has the
// handle. In 2.10 it is that of c10::cuda::CUDAStream::stream(), a member function that is found
// by its name, because the headers and the library of CUDA are not there everywhere. The only
// member of a CUDAStream is the Stream, so that the address of one is that of the other.
template <class Guard>
auto handle_of(const Guard& guard, c10::Stream stream, int)
    -> decltype(guard.getStreamNativeHandle(stream)) {
  return guard.getStreamNativeHandle(stream);
}

template <class Guard>
void* handle_of(const Guard&, c10::Stream stream, long) {
  using Function = void* (*)(const c10::Stream*);
  static const auto function = reinterpret_cast<Function>(dlsym(
      dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD), "_ZNK3c104cuda10CUDAStream6streamEv"));
  TORCH_CHECK(function, "this build of torch has no c10::cuda::CUDAStream::stream()");
  return function(&stream);
}

void* current_stream(const Driver& driver, c10::Device device, int index) {
  if (driver.stream) return driver.stream(index);
  const c10::impl::VirtualGuardImpl guard(device.type());
  return handle_of(guard, guard.getStream(device), 0);
}

// The last owner of a plan can be a node that ends in a thread of autograd, without the GIL.
template <class T>
std::shared_ptr<T> with_python_objects() {
  return std::shared_ptr<T>(new T(), [](T* held) {
    if (!Py_IsInitialized()) return;  // the process ends
    const py::gil_scoped_acquire gil;
    delete held;
  });
}

// ---- keys ---------------------------------------------------------------------------------------

using Words = c10::SmallVector<int64_t, 128>;

size_t hash_of(const Words& words) {
  uint64_t hash = words.size();
  for (const int64_t word : words) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

// An ordinary tensor in memory: no subclass, wrapper of a transform, negated view or sparse layout.
bool is_ordinary(const Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto rest = impl->key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView -
      c10::autocast_dispatch_keyset;
  if (rest != c10::DispatchKeySet(c10::DispatchKey::CUDA) &&
      rest != c10::DispatchKeySet(c10::DispatchKey::CPU)) {
    return false;
  }
  // A tangent of forward-mode differentiation, which the Python path refuses.
  const auto* meta = ta::impl::get_autograd_meta(tensor);
  return !meta || !meta->fw_grad_ || meta->fw_grad_->empty();
}

// No mode, transform or tracer is active. Inference mode and autocast, whose casts Python has done,
// change nothing in what a plan does.
bool state_is_ordinary() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const auto view = c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
  return (local.included_ - view) == (c10::default_included_set - view) &&
      ((local.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView) |
       c10::autocast_dispatch_keyset) == c10::default_excluded_set &&
      !at::impl::torch_function_mode_enabled();
}

void add(Words& words, const Tensor& tensor) {
  if (!tensor.defined()) return words.push_back(-1);
  const auto device = tensor.device();
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  words.push_back(tensor.dim() | static_cast<int64_t>(tensor.scalar_type()) << 8 |
                  static_cast<int64_t>(device.type()) << 16 | aligned << 24 |
                  static_cast<int64_t>(device.index() + 1) << 32);
  words.append(tensor.sizes().begin(), tensor.sizes().end());
  words.append(tensor.strides().begin(), tensor.strides().end());
}

// A number or name with its type, because True == 1 == 1.0; false for other objects.
bool add(Words& words, PyObject* value) {
  if (value == Py_None) {
    words.push_back(0);
  } else if (PyFloat_CheckExact(value)) {
    const double number = PyFloat_AS_DOUBLE(value);
    int64_t bits = 0;
    std::memcpy(&bits, &number, sizeof bits);
    words.append({1, bits});
  } else if (PyLong_CheckExact(value)) {
    int overflow = 0;
    const auto number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) return false;
    words.append({2, number});
  } else if (PyBool_Check(value)) {
    words.append({3, value == Py_True});
  } else if (PyUnicode_CheckExact(value)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(value, &size);
    if (!text) return PyErr_Clear(), false;
    words.append({4, size});
    for (Py_ssize_t at = 0; at < size; at += 8) {
      int64_t word = 0;
      std::memcpy(&word, text + at, std::min<Py_ssize_t>(8, size - at));
      words.push_back(word);
    }
  } else if (PyTuple_CheckExact(value)) {
    words.append({5, PyTuple_GET_SIZE(value)});
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      if (!add(words, PyTuple_GET_ITEM(value, i))) return false;
    }
  } else {
    return false;
  }
  return true;
}

constexpr size_t most_plans = 512;  // as prepared calls that Python keeps

// ---- plans --------------------------------------------------------------------------------------

struct TensorMap {  // the arguments of cuTensorMapEncodeTiled but for the address
  size_t offset;
  int value;
  int64_t skip;
  int dtype, interleave, swizzle, promotion, fill;
  std::vector<uint64_t> dims, strides;
  std::vector<uint32_t> box, steps;
  // The maps that were encoded last: training steps repeat addresses.
  static constexpr int kept = 4;
  struct Encoded {
    void* address = nullptr;
    alignas(64) char bytes[128];
  };
  Encoded encoded[kept];
  int next = 0;
};

struct Pointer {
  size_t offset;
  int value;
  int64_t skip;  // bytes from the value's first element
};

constexpr size_t most_parameter_bytes = 4096;

struct Kernel {
  void* function;
  std::array<unsigned, 7> sizes;  // grid, block, bytes of shared memory
  bool overlaps;
  std::string parameters;
  std::vector<Pointer> pointers;
  std::vector<TensorMap> maps;
  py::object known;  // the launch and its tensor maps in Python, for errors
};

struct Allocation {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool zeros;
};

struct View {
  int base;
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

struct Operation {
  c10::OperatorHandle handle;
  torch::jit::Stack arguments;
  std::vector<std::pair<int, int>> tensors;  // the position of an argument, its value
  std::vector<int> outputs;  // values; -1 for one that is an argument too
};

struct Step {
  enum Kind { allocation, view, operation, kernel } kind;
  int index;  // among the steps of this kind
  int value;  // the value that it makes
};

struct DriverError {
  int status;
  const char* function;
  const Kernel* kernel;  // null where none was to be launched
  int map;  // the number of a tensor map of the kernel; -1 for the launch itself
};

struct Plan;
using PlanPointer = std::shared_ptr<Plan>;

// Plans by key; a null pointer for a call that only Python has made yet, or can make.
class Plans {
 public:
  explicit Plans(size_t most) : most_(most) {}

  struct Entry {
    std::vector<int64_t> words;
    PlanPointer plan;
    int seen;  // calls in Python; -1: there is no native form
  };

  PlanPointer find(const Words& words) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Entry* entry = locate(words, hash_of(words));
    return entry ? entry->plan : nullptr;
  }

  // Counts a call in Python, and returns how many there were; -1: there is no native form.
  int count(const Words& words) {
    Dropped dropped;  // freed after the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& entry = obtain(words, dropped);
    return entry.seen < 0 ? -1 : ++entry.seen;
  }

  void keep(const Words& words, PlanPointer plan) {
    Dropped dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& entry = obtain(words, dropped);
    entry.seen = plan ? 0 : -1;
    entry.plan.swap(plan);
  }

  size_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return size_;
  }

 private:
  using Map = std::unordered_map<size_t, std::vector<Entry>>;
  using Dropped = Map;

  Entry* locate(const Words& words, size_t hash) {
    const auto found = map_.find(hash);
    if (found == map_.end()) return nullptr;
    for (auto& entry : found->second) {
      if (entry.words.size() == words.size() &&
          std::equal(words.begin(), words.end(), entry.words.begin())) {
        return &entry;
      }
    }
    return nullptr;
  }

  Entry& obtain(const Words& words, Dropped& dropped) {
    const size_t hash = hash_of(words);
    if (Entry* entry = locate(words, hash)) return *entry;
    if (size_ >= most_) {  // as the cache of prepared calls in Python
      dropped.swap(map_);
      size_ = 0;
    }
    ++size_;
    auto& entries = map_[hash];
    entries.push_back({{words.begin(), words.end()}, nullptr, 0});
    return entries.back();
  }

  std::mutex mutex_;
  Map map_;
  size_t size_ = 0;
  const size_t most_;
};

// Makes the primary context of the device current: a thread of autograd may have none.
struct InContext {
  const Driver& driver;
  bool pushed = false;

  InContext(const Driver& driver, void* context) : driver(driver) {
    void* now = nullptr;
    if (!context) return;  // nothing is launched
    check(driver.current_context(&now), "cuCtxGetCurrent");
    if (now == context) return;
    check(driver.push_context(context), "cuCtxPushCurrent");
    pushed = true;
  }

  ~InContext() {
    void* popped = nullptr;
    if (pushed) driver.pop_context(&popped);
  }

  static void check(int status, const char* function) {
    if (status) throw DriverError{status, function, nullptr, -1};
  }
};

struct Plan {
  int inputs = 0, values = 0;
  std::vector<std::pair<int, Tensor>> constants;
  std::vector<Step> steps;
  std::vector<Allocation> allocations;
  std::vector<View> views;
  std::vector<Operation> operations;
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::vector<int> results;  // values; -1 for none
  bool draws = false;  // whether a call without rng draws one
  void* context = nullptr;
  int device_index = 0;
  std::unique_ptr<Plans> backwards;  // of the calls of a forward plan
  py::object options;  // the CallOptions of the call, for a backward pass in Python
  py::object record;  // what reports are made of
  std::mutex maps_mutex;

  static void* address(const Tensor& tensor, int64_t skip) {
    return tensor.defined() ? static_cast<char*>(tensor.data_ptr()) + skip : nullptr;
  }

  void launch(const Driver& driver, Kernel& kernel, c10::ArrayRef<Tensor> tensors, void* stream) {
    alignas(128) char parameters[most_parameter_bytes];
    std::memcpy(parameters, kernel.parameters.data(), kernel.parameters.size());
    for (const auto& [offset, value, skip] : kernel.pointers) {
      void* const at = address(tensors[value], skip);
      std::memcpy(parameters + offset, &at, sizeof at);
    }
    for (auto& map : kernel.maps) {
      write_map(driver, kernel, map, address(tensors[map.value], map.skip), parameters);
    }
    void* arguments[] = {parameters};
    static constexpr Overlap overlap;
    LaunchConfig config{{}, stream, &overlap, kernel.overlaps};
    std::copy(kernel.sizes.begin(), kernel.sizes.end(), config.sizes);
    const int status = driver.launch(&config, kernel.function, arguments, nullptr);
    if (status) throw DriverError{status, "cuLaunchKernelEx", &kernel, -1};
  }

  void write_map(const Driver& driver, Kernel& kernel, TensorMap& map, void* address, char* to) {
    const std::lock_guard<std::mutex> lock(maps_mutex);  // two threads may launch the same call
    for (auto& known : map.encoded) {
      if (known.address == address) {
        std::memcpy(to + map.offset, known.bytes, sizeof known.bytes);
        return;
      }
    }
    auto& made = map.encoded[map.next];
    made.address = nullptr;
    map.next = (map.next + 1) % TensorMap::kept;
    const int status = driver.encode(
        made.bytes, map.dtype, map.dims.size(), address, map.dims.data(), map.strides.data(),
        map.box.data(), map.steps.data(), map.interleave, map.swizzle, map.promotion, map.fill);
    if (status) {
      throw DriverError{status, "cuTensorMapEncodeTiled", &kernel, int(&map - kernel.maps.data())};
    }
    made.address = address;
    std::memcpy(to + map.offset, made.bytes, sizeof made.bytes);
  }

  // Goes through the steps; the inputs are the first values. Needs no GIL.
  std::vector<Tensor> run(const Driver& driver, std::vector<Tensor> tensors) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto device = tensors[0].device();
    const auto keys = c10::DispatchKeySet(
        device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
    tensors.resize(values);
    for (const auto& [value, tensor] : constants) tensors[value] = tensor;
    const InContext in_context(driver, context);
    void* const stream = current_stream(driver, device, device_index);
    for (const auto& [kind, index, value] : steps) {
      switch (kind) {
        case Step::allocation: {
          const auto& [sizes, strides, dtype, zeros] = allocations[index];
          tensors[value] = at::_ops::empty_strided::redispatch(
              keys, c10::fromIntArrayRefSlow(sizes), c10::fromIntArrayRefSlow(strides), dtype,
              c10::kStrided, device, false);
          if (zeros) tensors[value].zero_();
          break;
        }
        case Step::view: {
          const auto& [base, sizes, strides, offset] = views[index];
          const auto& from = tensors[base];
          tensors[value] = from.as_strided(sizes, strides, from.storage_offset() + offset);
          break;
        }
        case Step::operation: {
          const auto& [handle, arguments, places, outputs] = operations[index];
          auto stack = arguments;
          for (const auto& [at, from] : places) stack[at] = tensors[from];
          handle.callBoxed(stack);
          for (size_t i = 0; i < outputs.size(); ++i) {
            if (outputs[i] >= 0) tensors[outputs[i]] = stack[i].toTensor();
          }
          break;
        }
        case Step::kernel:
          launch(driver, *kernels[index], tensors, stream);
      }
    }
    std::vector<Tensor> found;
    found.reserve(results.size());
    for (const int value : results) found.push_back(value < 0 ? Tensor() : tensors[value]);
    return found;
  }

};


// ---- the calls of one operator ------------------------------------------------------------------

struct Calls {
  Driver driver{};
  Plans forwards{most_plans};
  py::dict environment;  // of os.environ, which Python changes in place
  std::vector<py::object> variables;  // those that a call in Python follows
  py::object variable, on;  // FLASHGEN_NATIVE and the set of its values with native calls
  py::object differentiate;  // the backward pass in Python
  py::object explain;  // raises the LaunchError of a status
  std::mutex mutex;
  PlanPointer last_forward, last_backward;  // for reports; null after a call in Python
  std::atomic<int64_t> forward_hits{0}, backward_hits{0};

  void note(PlanPointer& last, PlanPointer plan) {
    const std::lock_guard<std::mutex> lock(mutex);
    last.swap(plan);  // the old one is freed after the lock
  }

  py::object record(const PlanPointer& last) {
    const std::lock_guard<std::mutex> lock(mutex);
    return last ? last->record : py::none();
  }

  bool environment_is_ordinary() const {
    for (const auto& name : variables) {
      if (PyDict_Contains(environment.ptr(), name.ptr())) return PyErr_Clear(), false;
    }
    PyObject* const value = PyDict_GetItem(environment.ptr(), variable.ptr());
    return !value || PySet_Contains(on.ptr(), value) == 1;
  }

  // Raises in Python what the Python path raises. Needs the GIL.
  void raise(const DriverError& error) const {
    explain(error.status, error.function, error.kernel ? error.kernel->known : py::none(),
            error.map);
  }
};

using CallsPointer = std::shared_ptr<Calls>;

// The node of a forward call. Its backward pass needs the GIL only for a call without a plan.
struct AttendBackward : ta::Node {
  CallsPointer calls;
  PlanPointer plan;
  std::vector<ta::SavedVariable> saved;  // q, k, v, out, lse, rng, captured tensors

  std::string name() const override {
    return "AttendBackward";
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved) each.reset_data();
  }

  void compiled_args(ta::CompiledNodeArgs&) const override {
    with_python([] {
      py::module_::import("flashgen.calls.native.calls").attr("refuse_compiled_autograd")();
      return ta::variable_list();
    });
  }

  ta::variable_list apply(ta::variable_list&& gradients) override {
    Tensor dout = gradients[0];
    const Tensor& dlse = gradients[1];
    if (!dout.defined() && !dlse.defined()) return ta::variable_list(num_outputs());
    std::vector<Tensor> tensors;
    tensors.reserve(saved.size() + 2);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& each : saved) tensors.push_back(each.unpack(this->getptr()));
    }
    // A gradient that is not defined is zero; kernels take no dlse for one of zeros.
    if (!dout.defined()) dout = at::zeros_like(tensors[3]);
    tensors.insert(tensors.begin() + 5, {dout, dlse});
    Words words;
    bool ordinary = state_is_ordinary() && !c10::GradMode::is_enabled();
    for (const auto& each : tensors) {
      ordinary = ordinary && (!each.defined() || is_ordinary(each));
      if (ordinary) add(words, each);
    }
    if (!ordinary) return in_python(tensors, nullptr);
    words.push_back(at::globalContext().deterministicAlgorithms());
    for (size_t i = 0; i < num_outputs(); ++i) words.push_back(next_edge(i).is_valid());
    const auto found = plan->backwards->find(words);
    if (!found) return in_python(tensors, &words);
    try {
      auto results = found->run(calls->driver, std::move(tensors));
      ++calls->backward_hits;
      calls->note(calls->last_backward, found);
      return results;
    } catch (const DriverError& error) {
      return with_python([&]() -> ta::variable_list {
        calls->raise(error);
        return {};
      });
    }
  }

 private:
  template <class Function>
  static ta::variable_list with_python(Function function) {
    const py::gil_scoped_acquire gil;
    try {
      return function();
    } catch (py::error_already_set& error) {
      error.restore();
      python_error raised;
      raised.persist();
      throw std::move(raised);
    }
  }

  // The gradients from Python, which also gives the plan of later calls if it is asked to.
  ta::variable_list in_python(const std::vector<Tensor>& tensors, const Words* words) {
    return with_python([&] {
      // A plan serves later passes, which do not look at the variables.
      const bool learn = words && calls->environment_is_ordinary() &&
          plan->backwards->count(*words) > 0;
      py::tuple given(tensors.size()), needs(num_outputs());
      for (size_t i = 0; i < tensors.size(); ++i) {
        given[i] = tensors[i].defined() ? py::cast(tensors[i]) : py::none();
      }
      for (size_t i = 0; i < num_outputs(); ++i) needs[i] = py::bool_(next_edge(i).is_valid());
      const py::tuple answer = calls->differentiate(plan->options, given, needs, learn);
      ta::variable_list results;
      for (const auto& each : answer[0]) {
        results.push_back(each.is_none() ? Tensor() : each.cast<Tensor>());
      }
      if (learn) {
        const py::object made = answer[1];
        plan->backwards->keep(*words, made.is_none() ? nullptr : made.cast<PlanPointer>());
      }
      return results;
    });
  }
};

// The arguments of `call`, in order.
enum { Q, K, V, RNG, CAPTURED, SCALE, Q_OFFSET, K_OFFSET, BACKEND, ARCH, DETERMINISTIC, SPLIT_SIZE,
       SCALARS, DROPOUT_P, RETURN_LSE };

struct Arguments {
  std::vector<Tensor> tensors;  // q, k, v, rng or an undefined one, the captured tensors
  Words words;
  bool needs_gradients = false;

  // False where anything is unusual.
  bool read(PyObject* const* given) {
    tensors.reserve(8);
    for (const int i : {Q, K, V, RNG}) {
      if (!take(given[i])) return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[CAPTURED]); ++i) {
      if (!take(PyTuple_GET_ITEM(given[CAPTURED], i))) return false;
    }
    for (int i = SCALE; i <= DROPOUT_P; ++i) {
      if (!add(words, given[i])) return false;
    }
    needs_gradients = needs_gradients && c10::GradMode::is_enabled();
    words.push_back(needs_gradients);
    return tensors[Q].defined() && tensors[K].defined() && tensors[V].defined();
  }

 private:
  bool take(PyObject* object) {
    Tensor tensor;
    if (object != Py_None) {
      if (!THPVariable_CheckExact(object)) return false;
      tensor = THPVariable_Unpack(object);
      if (!is_ordinary(tensor)) return false;
      needs_gradients = needs_gradients || tensor.requires_grad();
    }
    add(words, tensor);
    tensors.push_back(std::move(tensor));
    return true;
  }
};

template <class T>
auto make_node() {  // torch counts nodes by themselves since 2.13
  if constexpr (std::is_same_v<decltype(ta::Edge::function), std::shared_ptr<ta::Node>>) {
    return std::shared_ptr<T>(new T());
  } else {
    return c10::make_intrusive<T>();
  }
}

void add_node(const CallsPointer& calls, const PlanPointer& plan,
              const std::vector<Tensor>& tensors, const std::vector<Tensor>& results) {
  auto node = make_node<AttendBackward>();
  node->calls = calls;
  node->plan = plan;
  ta::edge_list edges;
  edges.reserve(tensors.size() - 1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i != RNG) edges.push_back(ta::impl::gradient_edge(tensors[i]));
  }
  node->set_next_edges(std::move(edges));
  for (const auto& result : results) ta::set_history(result, node);
  node->saved.reserve(tensors.size() + 2);
  for (const int i : {Q, K, V}) node->saved.emplace_back(tensors[i], false);
  for (const auto& result : results) node->saved.emplace_back(result, true);
  for (size_t i = RNG; i < tensors.size(); ++i) node->saved.emplace_back(tensors[i], false);
}

CallsPointer& calls_of(PyObject* self) {
  return *static_cast<CallsPointer*>(PyCapsule_GetPointer(self, nullptr));
}

// What the Python path returns; None where the call is unusual or has no plan.
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto& calls = calls_of(self);
  Arguments arguments;
  PlanPointer plan;
  if (state_is_ordinary() && calls->environment_is_ordinary() && arguments.read(given)) {
    plan = calls->forwards.find(arguments.words);
  }
  if (!plan) Py_RETURN_NONE;
  auto& tensors = arguments.tensors;
  std::vector<Tensor> results;
  std::optional<DriverError> failed;
  {
    const py::gil_scoped_release no_gil;
    if (plan->draws && !tensors[RNG].defined()) {
      tensors[RNG] = at::randint(INT64_MAX, {2}, tensors[Q].options().dtype(at::kLong));
    }
    try {
      results = plan->run(calls->driver, tensors);
      if (arguments.needs_gradients) add_node(calls, plan, tensors, results);
    } catch (const DriverError& error) {
      failed = error;
    }
  }
  if (failed) {
    calls->raise(*failed);
    return nullptr;
  }
  ++calls->forward_hits;
  calls->note(calls->last_forward, plan);
  const THPObjectPtr out(THPVariable_Wrap(std::move(results[0])));
  if (given[RETURN_LSE] != Py_True) return Py_NewRef(out.get());
  const THPObjectPtr lse(THPVariable_Wrap(std::move(results[1])));
  return PyTuple_Pack(2, out.get(), lse.get());
  END_HANDLE_TH_ERRORS
}

// Called after a call in Python: whether it is time to make a plan, at the second such call.
PyObject* wants_plan(PyObject* self, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto& calls = calls_of(self);
  Arguments arguments;
  if (!state_is_ordinary() || !calls->environment_is_ordinary() || !arguments.read(given)) {
    Py_RETURN_FALSE;
  }
  return PyBool_FromLong(calls->forwards.count(arguments.words) > 1);
  END_HANDLE_TH_ERRORS
}

// The last argument is a Plan, or None where the call has no native form.
PyObject* keep_plan(PyObject* self, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Arguments arguments;
  if (arguments.read(given)) {
    const py::handle plan = given[RETURN_LSE + 1];
    calls_of(self)->forwards.keep(
        arguments.words, plan.is_none() ? nullptr : plan.cast<PlanPointer>());
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

#define FUNCTION(name) {#name, reinterpret_cast<PyCFunction>(name), METH_FASTCALL, nullptr}
PyMethodDef functions[] = {FUNCTION(call), FUNCTION(wants_plan), FUNCTION(keep_plan)};

py::tuple functions_of(const CallsPointer& calls) {
  const py::capsule self(new CallsPointer(calls),
                         [](void* held) { delete static_cast<CallsPointer*>(held); });
  py::tuple made(std::size(functions));
  for (size_t i = 0; i < std::size(functions); ++i) {
    made[i] = py::reinterpret_steal<py::object>(PyCFunction_New(&functions[i], self.ptr()));
  }
  return made;
}

// An argument of an operation; a number in the place of a tensor is one as torch makes it.
c10::IValue argument_of(const py::handle& value, const c10::TypePtr& type) {
  const bool is_number = PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr());
  if (type->kind() != c10::TypeKind::TensorType || !is_number) {
    return torch::jit::toIValue(value, type);
  }
  const auto scalar = torch::jit::toIValue(value, c10::NumberType::get()).toScalar();
  Tensor number = at::scalar_tensor(scalar, PyLong_Check(value.ptr()) ? at::kLong : at::kDouble);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

template <class T>
T function_at(uintptr_t address) {
  return reinterpret_cast<T>(address);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Plan, PlanPointer>(module, "Plan")
      .def(py::init([](int inputs, int device_index, bool draws, py::object options) {
        auto plan = with_python_objects<Plan>();
        plan->values = inputs;
        plan->device_index = device_index;
        plan->draws = draws;
        plan->options = std::move(options);
        plan->record = py::none();
        plan->backwards = std::make_unique<Plans>(most_plans);
        return plan;
      }))
      .def("constant",
           [](Plan& plan, const Tensor& tensor) {
             plan.constants.emplace_back(plan.values, tensor);
             return plan.values++;
           })
      .def("allocate",
           [](Plan& plan, std::vector<int64_t> sizes, std::vector<int64_t> strides,
              at::ScalarType dtype, bool zeros) {
             plan.steps.push_back({Step::allocation, int(plan.allocations.size()), plan.values});
             plan.allocations.push_back({std::move(sizes), std::move(strides), dtype, zeros});
             return plan.values++;
           })
      .def("view",
           [](Plan& plan, int base, std::vector<int64_t> sizes, std::vector<int64_t> strides,
              int64_t offset) {
             plan.steps.push_back({Step::view, int(plan.views.size()), plan.values});
             plan.views.push_back({base, std::move(sizes), std::move(strides), offset});
             return plan.values++;
           })
      // Tensors among the arguments are None, and stand in `tensors` as (place, value).
      .def("operation",
           [](Plan& plan, const std::string& name, const std::string& overload, py::args arguments,
              const std::vector<std::pair<int, int>>& tensors, int outputs, bool makes) {
             const auto handle =
                 c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
             torch::jit::Stack stack;
             const auto& declared = handle.schema().arguments();
             for (size_t i = 0; i < arguments.size(); ++i) {
               stack.push_back(argument_of(arguments[i], declared[i].type()));
             }
             std::vector<int> values;
             for (int i = 0; i < outputs; ++i) values.push_back(makes ? plan.values++ : -1);
             plan.steps.push_back({Step::operation, int(plan.operations.size()), -1});
             plan.operations.push_back({handle, std::move(stack), tensors, values});
             return values;
           },
           py::arg("name"), py::arg("overload"), py::kw_only(), py::arg("tensors"),
           py::arg("outputs"), py::arg("makes"))
      .def("kernel",
           [](Plan& plan, uintptr_t function, const std::array<unsigned, 7>& sizes, bool overlaps,
              const py::bytes& parameters,
              const std::vector<std::tuple<size_t, int, int64_t>>& pointers, py::object known) {
             auto kernel = std::make_unique<Kernel>();
             kernel->function = reinterpret_cast<void*>(function);
             kernel->sizes = sizes, kernel->overlaps = overlaps;
             kernel->parameters = parameters;
             TORCH_CHECK(kernel->parameters.size() <= most_parameter_bytes);
             for (const auto& [offset, value, skip] : pointers) {
               kernel->pointers.push_back({offset, value, skip});
             }
             kernel->known = std::move(known);
             plan.steps.push_back({Step::kernel, int(plan.kernels.size()), -1});
             plan.kernels.push_back(std::move(kernel));
           })
      // A tensor map of the last kernel.
      .def("map",
           [](Plan& plan, size_t offset, int value, int64_t skip, const std::array<int, 5>& kinds,
              std::vector<uint64_t> dims, std::vector<uint64_t> strides,
              std::vector<uint32_t> box) {
             TensorMap map;
             map.offset = offset, map.value = value, map.skip = skip;
             map.dtype = kinds[0], map.interleave = kinds[1], map.swizzle = kinds[2];
             map.promotion = kinds[3], map.fill = kinds[4];
             map.steps.assign(box.size(), 1);
             map.dims = std::move(dims), map.strides = std::move(strides), map.box = std::move(box);
             plan.kernels.back()->maps.push_back(std::move(map));
           })
      .def_readwrite("results", &Plan::results)
      .def_readwrite("record", &Plan::record)
      .def_property(
          "context", [](const Plan& plan) { return reinterpret_cast<uintptr_t>(plan.context); },
          [](Plan& plan, uintptr_t context) { plan.context = reinterpret_cast<void*>(context); });
  py::class_<Calls, CallsPointer>(module, "Calls")
      .def(py::init([](const std::array<uintptr_t, 6>& driver, py::dict environment,
                       std::vector<py::object> variables, py::object variable, py::object on,
                       py::object differentiate, py::object explain) {
        auto calls = with_python_objects<Calls>();
        auto& to = calls->driver;
        to.launch = function_at<decltype(to.launch)>(driver[0]);
        to.current_context = function_at<decltype(to.current_context)>(driver[1]);
        to.push_context = function_at<decltype(to.push_context)>(driver[2]);
        to.pop_context = function_at<decltype(to.pop_context)>(driver[3]);
        to.encode = function_at<decltype(to.encode)>(driver[4]);
        to.stream = function_at<decltype(to.stream)>(driver[5]);
        calls->environment = std::move(environment);
        calls->variables = std::move(variables);
        calls->variable = std::move(variable);
        calls->on = std::move(on);
        calls->differentiate = std::move(differentiate);
        calls->explain = std::move(explain);
        return calls;
      }))
      .def("functions", &functions_of)
      .def("forget_forward", [](Calls& calls) { calls.note(calls.last_forward, nullptr); })
      .def("forget_backward", [](Calls& calls) { calls.note(calls.last_backward, nullptr); })
      .def_property_readonly("last_forward",
                             [](Calls& calls) { return calls.record(calls.last_forward); })
      .def_property_readonly("last_backward",
                             [](Calls& calls) { return calls.record(calls.last_backward); })
      .def_property_readonly("hits", [](Calls& calls) {
        return std::pair(calls.forward_hits.load(), calls.backward_hits.load());
      })
      .def_property_readonly("known", [](Calls& calls) { return calls.forwards.size(); });
}
